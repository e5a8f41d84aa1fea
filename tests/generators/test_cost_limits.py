import math

import pytest

from fedlight.generators.request_costs import Budget, Prices


@pytest.mark.parametrize("price", [math.nan, math.inf, -0.1])
def test_prices_that_are_none_are_refused(price):
    for prices in ((price, 1.0), (1.0, price)):
        with pytest.raises(ValueError, match=r"prices\.prompt"):
            Prices(*prices)


@pytest.mark.parametrize("limits", [{"max_cost": math.nan}, {"max_cost": -1.0}, {"max_requests": -1}])
def test_limits_that_are_none_are_refused(limits):
    with pytest.raises(ValueError, match="max_requests"):
        Budget(**limits, prices=Prices(1.0, 1.0))
