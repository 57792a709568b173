import riddles


class Task(riddles.Riddle):
    NEEDS_CONTAINER = True


class Tasks(riddles.vf.Taskset[Task, riddles.RiddlesConfig]):
    def load(self):
        yield Task(riddles.RiddleData(prompt="?", answer="!", level=0), self.config.task)


__all__ = ["Tasks"]
