"""Node's part of secure aggregation: its secrets of a round, and its checks before it uses them.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017,
https://doi.org/10.1145/3133956.3133982, figure 4 for a server that follows the protocol but would like to know. Its users
are the nodes here: a node adds up its own clients' updates, and masks the sum. Steps, each a message of the server:

    keys     each node makes a key for masks, one for letters and a seed, and tells the public keys
    shares   each node splits its mask key and its seed among all, in sealed letters that the server passes on
    visit    y_u = x_u + stream(seed_u) + sum over v > u of stream(k_uv) - sum over v < u of stream(k_uv)   mod 2^192
    unmask   of each node that has answered the others give shares of the seed, of each that has not shares of the mask key

A node gives never both of one node. Secrets are removed before they are used for the last time.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlight.flower.messages import Parcel, Refused, hex_of, value_of
from fedlight.flower.secure import masks
from fedlight.flower.secure.refusals import LEAST_NODES
from fedlight.flower.secure.ring import Ring, add, negative
from fedlight.support.files import full_disk_named, write_whole

MOST_NODES = 10_000
PUBLIC = ("mask", "letter", "seed")
"""What the others know of a node: its public keys for masks and letters, and a commitment to its seed."""


class NodeSecrets:
    """Secrets of a node for one round of one run, in the run's folder at the node.

    A sum is of ``least`` nodes at least: more than `LEAST_NODES` where they share the noise of the sum.
    """

    def __init__(self, folder: Path, run: str, least: int = LEAST_NODES) -> None:
        # A file, as Flower may have the messages of a round answered by different processes.
        self._file, self._run, self._least = folder / "secure.json", run, max(least, LEAST_NODES)

    def keys(self, asked: Parcel) -> dict[str, str]:
        """Return the public keys of a round, and a commitment to its seed; secrets of earlier rounds are forgotten."""
        kept = {name: masks.new_secret().hex() for name in PUBLIC}
        self._write({"step": "keys", "round": value_of(asked.header, "round", int), **kept})
        return self._public(kept)

    def shares(self, asked: Parcel) -> dict[str, str]:
        """Return for each other node a letter with shares of this one's secrets.

        Raises:
            Refused: there are too few nodes, keys are used twice, or this node's are not among them.
        """
        kept = self._read(asked, "keys")
        nodes = value_of(asked.header, "nodes", dict)
        if not self._least <= len(nodes) <= MOST_NODES or {*nodes} != {str(n + 1) for n in range(len(nodes))}:
            raise Refused(
                f"a secure sum of {len(nodes)} nodes is not safe: it takes {self._least} at least"
                + (" that share its noise (shared_by of ClipAndNoise)" if self._least > LEAST_NODES else "")
            )
        public: dict[str, dict[str, str]] = {}
        for name, keys in nodes.items():
            if not isinstance(keys, dict):
                raise Refused("the keys of a node are missing")
            public[name] = {key: hex_of(keys, key, masks.KEY_BYTES).hex() for key in PUBLIC}
        for key in PUBLIC:  # the masks with two nodes of one key would be the same stream
            if len({keys[key] for keys in public.values()}) != len(public):
                raise Refused("two nodes have the same key")
        here = next((name for name, keys in public.items() if keys == self._public(kept)), None)
        if here is None:
            raise Refused("the keys that this node has made are not among those of the round")
        threshold = masks.threshold_of(len(public))
        shares = [masks.split(bytes.fromhex(kept[key]), threshold, len(public)) for key in ("seed", "mask")]
        letters: dict[str, str] = {}
        held: dict[str, list[str]] = {}
        for place, (seed, mask_key) in enumerate(zip(*shares, strict=True)):
            name = str(place + 1)  # Shamir's shares are numbered from 1, so a share says whose it is
            if name == here:
                held = {name: [seed.hex(), mask_key.hex()]}
                continue
            letter_key = self._letter_key(kept, public[name]["letter"])
            letters[name] = masks.seal(letter_key, seed + mask_key, self._about(kept, here, name)).hex()
        self._write({**kept, "step": "shares", "own": here, "public": public, "held": held})
        return letters

    def take_letters(self, asked: Parcel) -> None:
        """Open the letters of the nodes that this one shares masks with, before it trains.

        Raises:
            Refused: a letter cannot be read, or too few nodes have written.
        """
        kept = self._read(asked, "shares")
        letters, here = value_of(asked.header, "letters", dict), kept["own"]
        held = dict(kept["held"])
        for name in letters:
            if name not in kept["public"] or name == here:
                raise Refused(f"a letter of node {name!r:.40}, which is not one of the round")
            key = self._letter_key(kept, kept["public"][name]["letter"])
            data = masks.unseal(key, hex_of(letters, name, masks.LETTER_BYTES), self._about(kept, name, here))
            held[name] = [data[: masks.SHARE_BYTES].hex(), data[masks.SHARE_BYTES :].hex()]
        if len(held) < max(self._least, least_of(len(kept["public"]))):
            raise Refused(f"{len(held)} of {len(kept['public'])} nodes are left, too few for a secure sum")
        self._write({**kept, "step": "letters", "held": held})

    def mask(self, asked: Parcel, values: Ring) -> Ring:
        """Return the sum of a node's clients as the server gets it."""
        kept = self._read(asked, "letters")
        total, elements, private = values.copy(), values.shape[1], bytes.fromhex(kept["mask"])
        add(total, masks.stream(bytes.fromhex(kept["seed"]), elements))
        for name in kept["held"]:  # only their shares can take a mask off
            if name != kept["own"]:
                public = bytes.fromhex(kept["public"][name]["mask"])
                add(total, pair_mask(private, public, int(kept["own"]), int(name), elements))
        self._write({**kept, "step": "masked"})
        return total

    def unmask(self, asked: Parcel) -> dict[str, dict[str, str]]:
        """Return shares of the seeds of nodes that have answered, and of the mask keys of those that have not.

        Once only: the secrets are forgotten before.

        Raises:
            Refused: a node is on both lists or on none, or too few have answered.
        """
        kept = self._read(asked, "masked")
        alive, gone = (value_of(asked.header, key, list) for key in ("alive", "gone"))
        listed = [*alive, *gone]
        texts = all(isinstance(name, str) for name in listed)
        if not texts or sorted(listed) != sorted(kept["held"]) or kept["own"] not in alive:
            raise Refused("the nodes of an unmasking are not those of the round, each once")
        if len(alive) < max(self._least, least_of(len(kept["public"]))):
            raise Refused(
                f"{len(alive)} of {len(kept['public'])} nodes have answered, too few to unmask a sum"
            )
        # A server that asks again with other lists would get both secrets of a node, and so what that node has sent.
        self._file.unlink()
        return {
            "seeds": {name: kept["held"][name][0] for name in alive},
            "masks": {name: kept["held"][name][1] for name in gone},
        }

    def _public(self, kept: Mapping[str, Any]) -> dict[str, str]:
        public = {key: masks.public_key(bytes.fromhex(kept[key])).hex() for key in ("mask", "letter")}
        return public | {"seed": masks.commitment(bytes.fromhex(kept["seed"])).hex()}

    def _letter_key(self, kept: Mapping[str, Any], public: str) -> bytes:
        return masks.agreed_key(bytes.fromhex(kept["letter"]), bytes.fromhex(public), "letters")

    def _about(self, kept: Mapping[str, Any], sender: str, receiver: str) -> str:
        # No letter can be passed off as another.
        return json.dumps([self._run, kept["round"], sender, receiver])

    def _read(self, asked: Parcel, step: str) -> dict[str, Any]:
        """Return the secrets, if they are those of the round and the step before has been done."""
        try:
            kept: dict[str, Any] = json.loads(self._file.read_text())
        except (OSError, ValueError) as error:
            raise Refused("this node has no secrets of the round: it was not asked for its keys") from error
        # In their order and each once: two answers to one step would tell more than the protocol does.
        if kept["round"] != value_of(asked.header, "round", int) or kept["step"] != step:
            raise Refused("the message is not of the step of secure aggregation that is due")
        return kept

    def _write(self, kept: Mapping[str, Any]) -> None:
        with full_disk_named(self._file):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.parent.chmod(0o700)  # the mode of the file itself is left to the umask
            write_whole(self._file, json.dumps(kept))


def least_of(nodes: int) -> int:
    """Return of how many nodes, of those that have given keys, a sum has to be."""
    return max(LEAST_NODES, masks.threshold_of(nodes))


def pair_mask(private: bytes, public: bytes, node: int, other: int, elements: int) -> Ring:
    """Return what ``node`` adds for ``other``, the negative of what that one adds; the keys are one of each."""
    mask = masks.stream(masks.agreed_key(private, public, "masks"), elements)
    return mask if node < other else negative(mask)
