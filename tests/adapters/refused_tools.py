import riddles


class Task(riddles.Riddle):
    @classmethod
    def toolsets(cls, config):
        return [riddles.vf.Toolset(riddles.vf.ToolsetConfig())]


class Tasks(riddles.vf.Taskset[Task, riddles.RiddlesConfig]):
    def load(self):
        yield Task(riddles.RiddleData(prompt="?", answer="!", level=0), self.config.task)


__all__ = ["Tasks"]
