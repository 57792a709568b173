import riddles


class Task(riddles.Riddle):
    async def setup(self, trace, runtime):
        await runtime.run("true")


class Tasks(riddles.vf.Taskset[Task, riddles.RiddlesConfig]):
    def load(self):
        yield Task(riddles.RiddleData(prompt="?", answer="!", level=0), self.config.task)


__all__ = ["Tasks"]
