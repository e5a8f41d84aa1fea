"""Generators of text, which answer prompts for Self-Instruct or a judge; the interface is `endpoint.TextGenerator`.

`endpoint` asks a server through the ``openai`` package and keeps its answers (`answer_cache`) within limits
(`request_costs`); `local_generator` asks a model of this machine, `toy_teacher` none.
"""

from fedlight.support.lazy import lazy_names

_FILES = {
    "ChatEndpoint": "endpoint",
    "TextGenerator": "endpoint",
    "LocalGenerator": "local_generator",
    "ToyTeacher": "toy_teacher",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
