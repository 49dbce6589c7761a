"""`python -m triptych` is the same as `triptych`."""

from triptych.cli import main

if __name__ == "__main__":
    main()
