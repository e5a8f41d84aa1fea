"""What is refused in words that match."""

import pytest


def refusal(match):
    return pytest.raises(ValueError, match=match)
