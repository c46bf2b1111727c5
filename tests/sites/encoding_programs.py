"""What ranks run that encode by themselves, though their gradients are not on an accelerator."""

import os
from pathlib import Path
from unittest.mock import patch

from isthmus.sites.worker.exchange.shard_encoder import ShardEncoder
from tests.sites import worker_programs


def train_encoding(folder: Path, name: str) -> None:
    """As worker_programs.train; leaves a file that says how many buckets were encoded."""
    os.environ["ISTHMUS_ENCODE"] = "rank"
    encode = ShardEncoder.encode
    with patch.object(ShardEncoder, "encode", autospec=True, side_effect=encode) as counted:
        worker_programs.train(folder, name)
    (folder / f"{name}.encoded").write_text(str(counted.call_count))
