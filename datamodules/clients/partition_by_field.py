"""Whose example is whose, said by the examples themselves: what `FederatedWrapper` needs, as plain values for a config."""

from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from fedlight.datamodules.clients.partition import Clients, Partition


class PartitionByField:
    """Shares out a training set whose examples are tuples or dicts, by one of their fields.

    In YAML, as ``clients`` of a `FederatedWrapper`: ``{class_path: fedlight.PartitionByField, init_args: {partition: {by:
    dirichlet, num_clients: 50}, field: label}}``. Each example is read once.

    Args:
        partition: how; ``by: client`` takes the field for the client's id, ``by: dirichlet`` for the category of the
            example, and ``by: iid`` does not look at it.
        field: position in a tuple or key of a dict; a number, a text, or a tensor of one number.
        seed: of the shares.

    Example:
        >>> examples = [("a", 0), ("b", 1), ("c", 0)]
        >>> {client: list(map(int, i)) for client, i in PartitionByField(Partition(by="client"))(examples).items()}
        {'0': [0, 2], '1': [1]}
    """

    def __init__(self, partition: Partition, field: int | str = 1, seed: int = 0) -> None:
        self.partition = partition
        self.field = field
        self.seed = seed

    def __call__(self, train_set: Dataset | list[Any]) -> Clients:
        """The clients of a training set: client id -> indices into it.

        Raises:
            ValueError: examples have no such field, or the sizes of the partition cannot be met.
        """
        indices = range(len(train_set))  # type: ignore[arg-type]
        values = [] if self.partition.by == "iid" else [self._value(train_set[i]) for i in indices]
        return self.partition.split(values, values, indices, self.seed)

    def _value(self, example: Any) -> str:
        try:
            value = example[self.field]
        except (IndexError, KeyError, TypeError) as error:
            raise ValueError(
                f"clients: field={self.field!r} is not in an example of the training set, which is a "
                f"{type(example).__name__}: give the position in a tuple or the key of a dict"
            ) from error
        return str(value.item() if isinstance(value, Tensor) else value)
