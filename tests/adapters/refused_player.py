import riddles


class Player(riddles.vf.Env[riddles.vf.EnvConfig]):
    async def run(self, task, agents):
        pass


Riddles = riddles.Riddles
__all__ = ["Player", "Riddles"]
