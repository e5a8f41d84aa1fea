"""A model that says what a test wants, to the prompts of self-generation; a token is a word."""

from fedlight.evaluation.tasks.model import Likelihood


class Words:
    """A tokenizer."""

    eos_token = "</s>"

    def __call__(self, texts, add_special_tokens=True):
        return {"input_ids": [text.split() for text in texts]}


class ScriptedModel:
    """Writes what ``write`` gives of a count of different first prompts, and ``respond`` of an instruction and a count.

    Args:
        write: number -> a new instruction.
        respond: instruction, number of the try -> input and response.
        limit: most tokens of a prompt and its answer.
    """

    def __init__(self, write=None, respond=None, limit=10_000):
        self.write = write or (lambda number: f"write about thing{number}")
        self.respond = respond or (lambda instruction, number: f"Input: none\nResponse: done {instruction}")
        self.limit, self.tokenizer = limit, Words()
        self.first, self.second, self.calls = [], [], []

    def generate(
        self, prompts, n=1, temperature=0.7, top_p=1.0, max_new_tokens=80, seed=0, *, stop=(), strip=True
    ):
        assert n == 1
        assert self.fits(prompts, max_new_tokens) == [True] * len(prompts)
        self.calls.append((len(prompts), temperature, seed, tuple(stop), max_new_tokens))
        texts = [" ".join(self._one(prompt).split(" ")[:max_new_tokens]) for prompt in prompts]
        return [[text.strip() if strip else text] for text in texts]

    def _one(self, prompt):
        if not prompt.endswith("\nInput:"):
            self.first.append(prompt)
            return self.write(len(self.first) - 1)
        self.second.append(prompt)
        instruction = prompt.rpartition("Instruction: ")[2].partition("\n")[0].strip()
        before = sum(one.endswith(f"Instruction: {instruction}\nInput:") for one in self.second)
        return self.respond(instruction, before - 1)

    def fits(self, prompts, new_tokens):
        return [len(prompt.split()) + new_tokens <= self.limit for prompt in prompts]

    def log_likelihoods(self, prompts, continuations):
        """A loss of 1 per token behind a prompt and of as many as the text has words without."""
        return [
            [
                Likelihood(-float(len(one.split()) ** (1 if prompt else 2)), len(one.split()), True)
                for one in own
            ]
            for prompt, own in zip(prompts, continuations, strict=True)
        ]
