"""Messages that are changed or lost on their way between a server and nodes: functions for `nodes_here.Here`."""

from safetensors.torch import load, save

from fedlight.flower.messages import Parcel, Refused

LOST = Refused("lost")


def lost(action, *nodes, round_idx=None, answer=LOST):
    """Return a change that gives ``answer`` for the answers of nodes to an action; of all nodes where none is named."""

    def change(message):
        head = message.asked.header
        is_lost = head["action"] == action and (not nodes or message.node in nodes)
        return answer if is_lost and round_idx in (None, head.get("round")) else message.answer

    return change


def changed(action, node, change):
    """Return a change by ``change(answer)`` of a node's answers to an action."""

    def of_message(message):
        is_it = (message.asked.header["action"], message.node) == (action, node)
        return change(message.answer) if is_it else message.answer

    return of_message


def after_visits(there, number, act):
    """Have something done once, before the server asks when there have been so many visits or more."""

    def before():
        if len(there.of("visit")) >= number:
            there.before = lambda: None
            act()

    there.before = before


def with_header(name, value, parcel):
    """Return a parcel with another value of a field, or a new field."""
    return Parcel(parcel.header | {name: value}, parcel.payloads)


def without_header(name, parcel):
    """Return a parcel without a field."""
    return Parcel({key: value for key, value in parcel.header.items() if key != name}, parcel.payloads)


def with_visit(name, value, parcel):
    """Return a parcel with another value of a field of the first visit."""
    first, *others = parcel.header["visits"]
    return with_header("visits", [first | {name: value}, *others], parcel)


def with_payload(change, parcel):
    """Return a parcel whose payloads are changed, each as bytes."""
    return Parcel(parcel.header, {name: change(data) for name, data in parcel.payloads.items()})


def with_tensors(change, parcel):
    """Return a parcel whose payloads are changed as tensors, as far as a file of them can still be written."""
    return with_payload(lambda data: save(change(load(data))), parcel)


def odd_values(fitting, odd):
    """Yield each field with the odd values that it may not have; ``fitting``: field -> those of them that it may have."""
    for name, fits in fitting.items():
        for value in odd:
            if not any(value is one or (type(value) is type(one) and value == one) for one in fits):
                yield name, value
