import riddles


class Task(riddles.Riddle):
    @riddles.vf.reward
    async def passes(self, runtime):
        return 1.0


class Tasks(riddles.vf.Taskset[Task, riddles.RiddlesConfig]):
    def load(self):
        yield Task(riddles.RiddleData(prompt="?", answer="!", level=0), self.config.task)


__all__ = ["Tasks"]
