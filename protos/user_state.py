"""The default folder for a user's state."""

from __future__ import annotations

import errno
from pathlib import Path

import platformdirs


def user_state_folder() -> Path:
    """Return the platform's user state folder for isthmus.

    Raises:
        FileNotFoundError: this user has no home folder.
    """
    try:
        folder = platformdirs.user_state_path("isthmus")
    except RuntimeError:
        folder = Path()
    # Older releases of platformdirs then return "~/.local", a relative path.
    if not folder.is_absolute():
        raise FileNotFoundError(
            errno.ENOENT,
            "this user has no home folder, by $HOME or by the system's list of users: set HOME, "
            "or both ISTHMUS_HOME and ISTHMUS_TOKEN_FILE",
        )
    return folder
