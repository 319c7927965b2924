"""`python -m tests.mutants [NAME ...]`: plant faults, and see which are caught."""

import sys

from tests.mutants import mutants, run


def main(names: list[str]) -> int:
    survived = 0
    chosen = [m for m in mutants() if not names or any(m.name.startswith(name) for name in names)]
    for mutant in chosen:
        caught, said = run(mutant)
        survived += not caught
        print(f"{'caught' if caught else 'SURVIVED':<9} {mutant.name:<42} {mutant.caught_by:<36} {said}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} caught")
    return survived


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
