import verifiers.v1 as vf


class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass


class Tasks(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        yield Task(vf.TaskData(prompt="?"), self.config.task)


__all__ = ["Tasks"]
