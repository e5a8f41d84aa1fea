"""A text generator that says what a test wants, and two clients whose rows it is shown."""

from fedlight.generators.endpoint import TextGenerator


def rows(*topics):
    return [
        {"instruction": f"Tell about {one}.", "input": "", "response": f"All of {one}."} for one in topics
    ]


CLIENTS = {"c0": rows("apples", "pears", "plums"), "c1": rows("mars", "venus")}


class Scripted(TextGenerator):
    """Says what ``write`` (of a count from 0) and ``respond`` (of an instruction) give."""

    without_effect = ("write", "respond", "fail_after")

    def __init__(self, write=None, respond=None, fail_after=None):
        self.write, self.respond, self.fail_after = write, respond, fail_after
        self.calls, self.instructions, self.responses, self.released = [], [], [], 0
        self.draws = []

    def complete(self, prompts, draw=0):
        if self.fail_after is not None and len(self.calls) >= self.fail_after:
            raise OSError("the machine is gone")
        self.calls.append(list(prompts))
        self.draws.append(draw)
        return [self._one(prompt) for prompt in prompts]

    def release(self):
        self.released += 1

    def _one(self, prompt):
        if prompt.startswith("Example 1:"):
            self.responses.append(prompt)
            new = prompt.rpartition("Instruction: ")[2]
            return (self.respond or "about {}".format)(new)
        self.instructions.append(prompt)
        # The same prompt has the same answer, as of an endpoint with a cache.
        return (self.write or unlike)(len(self.instructions) - 1)


def unlike(number):
    return " ".join(f"{word}{number}" for word in ("write", "some", "words"))


def made(found):
    return {client: [row.fields["instruction"] for row in some] for client, some in found.items()}
