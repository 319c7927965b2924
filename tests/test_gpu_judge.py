"""`lockstep judge` on a GPU: ranks that share it, over NCCL."""

import pytest

from lockstep.judge.judging import reference_of
from tests.gpu import NEEDS_GPU
from tests.judged.cases import ON_GPU, Case, asked, judged, problem

pytestmark = NEEDS_GPU
SAMPLED = [
    case for case in ON_GPU if case.candidate.split(maxsplit=2)[1:] in (["ddp"], ["fsdp"], ["ddp", "--fault summed"])
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", SAMPLED, ids=lambda case: case.name)
def test_scripts_on_nccl(case: Case) -> None:
    with reference_of(asked(case)) as reference:
        assert (said := problem(case, judged(case, reference))) is None, said
