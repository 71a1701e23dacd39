"""`python -m specdec.cli`, the same as `specdec`."""

from specdec.cli import main

main()
