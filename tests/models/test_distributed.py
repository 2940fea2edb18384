"""Two processes with half of the batch each have the gradients of one process with all of it."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from subquad.models import SubquadForCausalLM, SubquadForMaskedLM
from tests.models.small import DECODABLE, METHODS, config, tokens


def gradients(method, rows, wrap=lambda model: model):
    torch.manual_seed(0)
    model_class = SubquadForCausalLM if method in DECODABLE else SubquadForMaskedLM
    model = model_class(config(method)).double().train()
    ids = tokens(6)[0][2:][rows]  # without pads, so that both halves count as many tokens
    wrapped = wrap(model)  # alive until the gradients are there
    logits = wrapped(input_ids=ids).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()  # in float64
    return {name: p.grad for name, p in model.named_parameters()}


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    rows = slice(2 * rank, 2 * rank + 2)
    found = {method.info.name: gradients(method, rows, DistributedDataParallel) for method in METHODS}
    if rank == 0:
        torch.save(found, f"{folder}/gradients.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    if not dist.is_gloo_available():
        pytest.skip("PyTorch was built without gloo")
    folder = tmp_path_factory.mktemp("ddp")
    mp.spawn(work, (str(folder),), nprocs=2)
    return torch.load(folder / "gradients.pt", weights_only=True)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.info.name)
def test_gradients_of_two_processes_are_those_of_one(parallel, method):
    expected = gradients(method, slice(None))
    found = parallel[method.info.name]
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-11, msg=name)
