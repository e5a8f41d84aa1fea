"""Map of the rows that each augmentation retrieved, over the texts of the domain (Figure 12 of FedDCA).

Z. Wang et al. (FedDCA), 2024, https://arxiv.org/abs/2409.20135, appendix A.10: t-SNE (van der Maaten and Hinton, JMLR
2008) of 10,000 texts of the domain, and of 5,000 that each way retrieved. Deviations: a panel for each way, since points
would hide each other, and another colour for rows from outside of the domain.
"""

from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord
from fedlight.datamodules.rows.columns import check_columns, text_at
from fedlight.datamodules.rows.fields import instruction_text
from fedlight.datamodules.rows.rows import load_rows
from fedlight.datamodules.vectors.encoders import Encoder, HashedEncoder, SentenceEncoder
from fedlight.report.figures.style import STYLE, add_legend, colors, new_grid, save
from fedlight.report.parts import shortened
from fedlight.support.seeding import derive_seed

MOST_OF_DOMAIN, MOST_RETRIEVED = 10_000, 5_000  # texts of the domain, and rows of a run
COMPONENTS = 50  # of PCA before t-SNE, like its authors
ACROSS = 3  # panels beside each other
MANY = 1000  # points that are drawn small
MOST_LETTERS, LETTERS_PER_INCH = 32, 11  # of a name in the legend


def retrieval_map(
    records: dict[str, str],
    source: str,
    columns: dict[str, str],
    output: str,
    encoder: str = "hashed",
    seed: int = 0,
) -> dict[str, Any]:
    """Draw texts of the domain and, in a panel for each run, the rows that its augmentation added for all clients.

    Args:
        records: label -> ``augmentation_folder`` of a run.
        source: texts of the domain, all that are to count as inside; see `fedlight.datamodules.rows.rows`.
        columns: the slots of its rows, in their order; ``response`` is passed over.
        output: the figure.
        encoder: folder or hub name of a sentence encoder, or ``hashed``.
        seed: of the draws and of t-SNE.

    Returns:
        ``file``; ``rows``: for each label how many distinct rows were ``retrieved``, and how many ``inside`` of the domain.

    Raises:
        ValueError: a folder has no record.
    """
    rows = load_rows(source)
    check_columns(rows, columns, source)
    domain = {instruction_text({name: text_at(row, path) for name, path in columns.items()}) for row in rows}
    read = {label: AugmentationRecord(folder).read().values() for label, folder in records.items()}
    added = {label: {instruction_text(row.fields) for row in chain(*rows)} for label, rows in read.items()}
    shown = {label: some(texts, MOST_RETRIEVED, seed, "map", label) for label, texts in added.items()}
    ground = some(domain, MOST_OF_DOMAIN, seed, "map", "domain")
    texts = list(dict.fromkeys([*ground, *(text for chosen in shown.values() for text in chosen)]))
    model: Encoder = HashedEncoder() if encoder == "hashed" else SentenceEncoder(encoder)
    place = dict(zip(texts, flatten(model.encode(texts), seed), strict=True))

    def places(texts: Collection[str], is_inside: bool) -> np.ndarray:
        """Return positions ``(rows, 2)`` of the texts in the domain, or of the others."""
        return np.array([place[text] for text in texts if (text in domain) is is_inside]).reshape(-1, 2)

    panels = {
        f"{label}\n{sum(text in domain for text in chosen):,} of {len(chosen):,} in the domain": {
            "added, in the domain": places(chosen, True),
            "added, of others": places(chosen, False),
        }
        for label, chosen in shown.items()
    }
    figure = draw_groups_of_points(places(ground, True), panels, "domain")
    return {
        "file": save(figure, output),
        "rows": [
            {"method": label, "retrieved": len(distinct), "inside": len(distinct & domain)}
            for label, distinct in added.items()
        ],
    }


def flatten(vectors: np.ndarray, seed: int, steps: int = 1000) -> np.ndarray:
    """Return the t-SNE of unit vectors, ``(rows, dimension)`` -> ``(rows, 2)``, at least two; the same for the same seed.

    ``steps``, at least 250, are those of its optimization; half of the usual thousand look much alike.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    start = derive_seed(seed, "t-SNE")
    components = min(COMPONENTS, *vectors.shape)
    fewer = PCA(components, random_state=start).fit_transform(vectors)
    perplexity = min(30.0, (len(vectors) - 1) / 3)  # scikit-learn wants less than the number of points
    fitted = TSNE(perplexity=perplexity, init="pca", random_state=start, max_iter=steps)
    flat: np.ndarray = fitted.fit_transform(fewer)
    return flat


@matplotlib.rc_context(STYLE)
def draw_groups_of_points(
    ground: np.ndarray, panels: Mapping[str, Mapping[str, np.ndarray]], ground_name: str, across: int = ACROSS
) -> Figure:
    """Draw a panel for each title, with groups of points ``(points, 2)`` over the same grey ones; a name has one colour."""
    across = min(across, len(panels))
    inches = max(2.6 * across, 4), 2.7 * -(-len(panels) // across) + 0.4
    figure, grid = new_grid(len(panels), across, inches, sharex=True, sharey=True)
    drawn = len(ground) + sum(len(dots) for groups in panels.values() for dots in groups.values())
    are_many = drawn > MANY
    style: Any = {"linewidths": 0, "rasterized": are_many}  # else an SVG of so many points is large
    size = 3 if are_many else 9
    names = list(dict.fromkeys(name for groups in panels.values() for name in groups))
    shades = dict(zip(names, colors(len(names), "groups of points"), strict=True))
    for axes, (title, groups) in zip(grid, panels.items(), strict=True):
        axes.set_axis_off()
        axes.scatter(ground[:, 0], ground[:, 1], s=size - 1, color="0.82", **style)
        for name, places in groups.items():
            axes.scatter(places[:, 0], places[:, 1], s=size, color=shades[name], **style)
        axes.set_title(title, fontsize="small")
    named = {ground_name: "0.82", **shades}
    longest = max(len(shortened(name, MOST_LETTERS)) for name in named)
    fitting = int(figure.get_figwidth() * LETTERS_PER_INCH) // (longest + 5)
    style = {"marker": "o", "linestyle": "", "markersize": 5}
    handles = [
        Line2D([], [], color=color, label=shortened(name, MOST_LETTERS), **style)
        for name, color in named.items()
    ]
    add_legend(figure, handles, columns=max(1, min(3, fitting)))
    for text in figure.legends[0].get_texts():
        text.set_fontsize("small")
    return figure


def some(texts: Collection[str], number: int, *seed: int | str) -> list[str]:
    """Draw at most ``number`` texts, each once; the result depends on the parts of the seed, not on their order.

    Examples:
        >>> some(["a", "b"], 5, 0) == some(["b", "a"], 5, 0), len(some(["a", "b", "c"], 2, 0))
        (True, 2)
    """
    in_order = sorted(texts)  # a set has no order that two runs share
    order = np.random.default_rng(derive_seed(*seed)).permutation(len(in_order))
    return [in_order[index] for index in order[:number]]
