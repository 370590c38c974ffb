"""``python -m gradstow`` is the ``gradstow`` command."""

import sys

from gradstow.cli import main

if __name__ == "__main__":
    sys.exit(main())
