"""A burn-in finds a device that computes, copies or adds up wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from isthmus.sites.facts.burn_in import Burn, compared
from isthmus.topology.spec.machine_facts import Burned


@pytest.mark.usefixtures("process_group")
def test_one_bit_of_a_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    burn = Burn(0, torch.device("cpu"))
    assert not burn.problem()
    right = torch.Tensor.__matmul__

    def wrong(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        product = right(one, other)
        product.view(torch.int32)[3, 5] ^= 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    assert "has other bits" in burn.problem()
    assert burn.num_products == 2


@pytest.mark.usefixtures("process_group")
def test_a_copy_and_a_sum_that_are_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    burn = Burn(0, torch.device("cpu"))

    def spoil(total: torch.Tensor, **_: Any) -> None:  # noqa: ANN401 - torch's own
        total[7] += 1

    with monkeypatch.context() as patch:
        patch.setattr(dist, "all_reduce", spoil)
        assert burn.problem() == "a sum over the devices is wrong"
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", lambda each: each.roll(1))
        assert burn.problem() == "what was copied to it and back is not the same"


def test_the_device_whose_product_differs_is_wrong_and_not_the_others() -> None:
    burned = [
        Burned(index=index, device="card", product="a1" if index == 2 else "b2")
        for index in range(4)
    ]
    assert [bool(each.problem) for each in compared(burned)] == [False, False, True, False]
    of_two = [Burned(index=index, device="card", product=str(index)) for index in range(2)]
    assert all("either" in each.problem for each in compared(of_two))
    unlike = [Burned(index=0, device="card", product="a"), Burned(index=1, device="x", product="b")]
    assert not any(each.problem for each in compared(unlike)), "of another kind"
