"""``python -m minato_gpu``: the command line, for torchrun among others."""

from minato_gpu.lab.cli import main

if __name__ == "__main__":
    main(prog_name="minato-gpu")
