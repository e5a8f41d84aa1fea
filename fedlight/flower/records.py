"""Parcels as Flower's records: the header in a ConfigRecord, each payload as one array of bytes."""

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedlight.flower.messages import Bounds, Parcel, Refused, read_header, write_header

RECORD, PAYLOADS, HEADER = "fedlight", "fedlight.payloads", "header"
STYPE = "fedlight.safetensors"


def to_record(parcel: Parcel) -> RecordDict:
    """Return a parcel as the content of a Flower message."""
    arrays = {
        name: Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)
        for name, data in parcel.payloads.items()
    }
    return RecordDict(
        {RECORD: ConfigRecord({HEADER: write_header(parcel.header)}), PAYLOADS: ArrayRecord(arrays)}
    )


def from_record(record: RecordDict, most_header: int = Bounds().header_bytes) -> Parcel:
    """Return the parcel of a Flower message's content, with a header of at most ``most_header`` bytes.

    Raises:
        Refused: it is none.
    """
    head, arrays = record.config_records.get(RECORD), record.array_records.get(PAYLOADS)
    if head is None or arrays is None or not isinstance(head.get(HEADER), bytes):
        raise Refused("it is no message of fedlight")
    payloads = {}
    for name, array in arrays.items():
        if array.stype != STYPE or not isinstance(array.data, bytes):
            raise Refused(f"its payload {name!r:.40} is no safetensors file")
        payloads[name] = array.data
    return Parcel(read_header(head[HEADER], most_header), payloads)
