"""The Trainer of Lightning, together with all other sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from isthmus.sites.worker.api.site import Site


class Together(Callback):  # type: ignore[misc] # lightning may not be there
    """A callback that trains the module with all other sites, under the strategy `ddp`.

    The loaders of the module read `site.part_of(dataset)`; Lightning divides that over the ranks of
    the site.
    """

    def __init__(self, site: Site, tokens: Callable[[Any], int] | None = None) -> None:
        """Make the callback for a site.

        `tokens` says what a batch's loss is a mean over, and so what it weighs; None: all ranks
        weigh alike.
        """
        self._site = site
        self._tokens = tokens

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give all sites the same parameters; from now on gradients cross.

        Raises:
            TypeError: the strategy does not wrap the module in DistributedDataParallel.
            ValueError: the module has several optimizers.
        """
        del pl_module
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"isthmus: want a module with one optimizer, this one has "
                f"{len(trainer.optimizers)}: use Fabric, and site.average_gradients"
            )
        model = trainer.strategy.model
        assert model is not None, "set up before training starts"
        self._site.attach(model, trainer.optimizers[0])

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:  # noqa: ANN401
        """Count what the batch weighs."""
        del trainer, module, index
        if self._tokens is not None:
            self._site.count_tokens(self._tokens(batch))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        module: Any,  # noqa: ANN401
        outputs: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        index: int,
    ) -> None:
        """Show the loss in `isthmus status`."""
        del module, batch
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None and (index + 1) % trainer.accumulate_grad_batches == 0:
            self._site.log(loss=loss)
