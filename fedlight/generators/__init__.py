"""Generators of text, which answer prompts for Self-Instruct or a judge; the interface is `endpoint.TextGenerator`.

`endpoint` asks a server through the ``openai`` package (`chat_server`) and keeps its answers, within limits
(`request_costs`); `local_generator` asks a model of this machine, `toy_teacher` none.
"""

from fedlight.support.lazy import room_names

_FILES = {"TextGenerator": "endpoint"}
__getattr__ = room_names(__name__, _FILES)
