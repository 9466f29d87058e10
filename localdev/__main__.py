"""`python3 -m localdev`: starts on a bare Python and runs the command in the project's virtual environment."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - it is an older Python that should read the sentence
    sys.exit("localdev needs Python 3.11 or newer; this is {}.{}.".format(*sys.version_info[:2]))

from localdev.commands import main

if __name__ == "__main__":
    sys.exit(main())
