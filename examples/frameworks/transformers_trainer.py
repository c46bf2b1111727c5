"""Train a small language model with the Trainer of Hugging Face transformers, at all sites.

Needs: pip install 'isthmus[transformers]'. The lines marked 1 and 2 are what isthmus needs.
"""

import torch
import transformers
from torch.utils.data import Dataset

import isthmus
from isthmus.sites.integrations.transformers import train_together

TEXT = (b"gradients cross the narrow land between two seas of machines. " * 400)[:16384]
LENGTH = 64


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of a text, byte by byte."""

    def __len__(self) -> int:
        return (len(TEXT) - 1) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = torch.tensor(list(TEXT[index * LENGTH : (index + 1) * LENGTH]))
        return {"input_ids": window, "labels": window}


def main() -> None:
    """Train for thirty steps."""
    site = isthmus.join(alone=True)  # 1: first of all, so that the Trainer finds the site's ranks
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=64, n_positions=LENGTH, vocab_size=256
    )
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(
            output_dir=str(site.run_folder / "trainer"),
            use_cpu=site.device.type == "cpu",
            per_device_train_batch_size=4,
            max_steps=30,
            learning_rate=2e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Windows(),
    )
    train_together(trainer, site)  # 2: the site's part of the data; gradients cross
    trainer.train()


if __name__ == "__main__":
    main()
