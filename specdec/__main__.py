"""`python -m specdec` is `specdec`."""

from specdec.cli import main

main()
