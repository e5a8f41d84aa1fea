"""People in a plane by their votes: those who vote alike lie close together.

C. Small et al., "Polis: Scaling Deliberation by Mapping High Dimensional Opinion Spaces", RECERCA 2021,
https://doi.org/10.6035/recerca.5516: principal components of the votes, where a missing one counts as the mean of those on
its statement; people with few votes would lie near the middle for that alone, and are moved outwards.
"""

import numpy as np


def opinion_space(votes: np.ndarray) -> np.ndarray:
    """Return the places of people, ``(people, 2)``, along the two directions of the largest differences of opinion.

    ``votes``, ``(people, statements)``, are 1 for agree, -1 for disagree, 0 for neither, which says nothing.

    Examples:
        >>> x, y = opinion_space(np.array([[1, 1, -1, -1], [1, 0, -1, -1], [-1, -1, 1, 1], [-1, -1, 1, 0]])).T
        >>> bool(x[0] * x[1] > 0 > x[0] * x[2]), bool(abs(x).min() > abs(y).max())
        (True, True)
    """
    from sklearn.decomposition import PCA

    votes = np.asarray(votes, dtype=float)
    has_voted = votes != 0  # [people, statements]
    counts = has_voted.sum(axis=0)  # [statements]
    means = votes.sum(axis=0) / np.maximum(counts, 1)  # no 0 / 0
    centred = np.where(has_voted, votes - means, 0.0)  # a missing vote counts as the mean
    places = np.zeros((len(votes), 2))
    number = min(2, *votes.shape)  # PCA has no more components than people or statements
    if number and centred.any():
        places[:, :number] = PCA(number, svd_solver="full").fit_transform(centred)  # "randomized" would draw
    of_person = has_voted.sum(axis=1, keepdims=True)
    # Moved outwards by the share of the statements that a person has voted on.
    return places * np.sqrt(votes.shape[1] / np.maximum(of_person, 1)) * (of_person > 0)
