"""Private names of torch, Lightning, torchmetrics and PyG: one file of each package reads them, and they are there."""

import ast
import re
from functools import cache

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.plugins.environments import LightningEnvironment
from processes import REPOSITORY
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.utils import store as agents
from torch_geometric.data import Data, HeteroData
from torchmetrics.wrappers import Running

from lightning_gnn import private_lightning, private_pyg, private_torch
from lightning_gnn.steps.metrics import FORWARD

PACKAGE = REPOSITORY / "lightning_gnn"
HOMES = {"private_torch.py", "private_lightning.py", "private_pyg.py", "steps/metrics.py"}
PACKAGES = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "torch_geometric")
PRIVATE = re.compile(r"_(?!_)\w+")
OF_OTHERS = {
    *("_asdict", "_replace", "_exit", "_getframe", "_current_frames", "_actions", "_run_exitfuncs"),  # of Python
    *("_mmap", "_cache", "_cache_file", "_source_stamp", "_internal"),  # of numpy, numba and pymetis, in one file each
    "_shows_once",  # ours, on a function
}
OWN_PARTS = {"self", "cls", "super()"}
METRICS = {"_defaults", "_reductions", "_update_count", "_computed", FORWARD, "_wrap_update", "_sync_dist"}


def names_of(node: ast.AST) -> list[str]:
    """Returns the private names in the paths and strings of a node; of imports, those from the packages in question."""
    if isinstance(node, ast.Import):
        paths = [each.name for each in node.names]
    elif isinstance(node, ast.ImportFrom):
        paths = [f"{node.module}.{each.name}" for each in node.names]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [part for part in node.value.split(".") if PRIVATE.fullmatch(part)] if " " not in node.value else []
    elif isinstance(node, ast.Attribute):
        return [node.attr] if PRIVATE.fullmatch(node.attr) and ast.unparse(node.value) not in OWN_PARTS else []
    else:
        return []
    paths = [path for path in paths if path.partition(".")[0] in PACKAGES]
    return [part for path in paths for part in path.split(".") if PRIVATE.fullmatch(part)]


def own_names(tree: ast.AST) -> set[str]:
    """Returns the private names that a file gives to attributes of its own classes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in OWN_PARTS:
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            found |= set(names_of(node.args[1]))
    return found


@cache
def trees() -> dict[str, ast.AST]:
    return {str(file.relative_to(PACKAGE)): ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}


@cache
def declared() -> frozenset[str]:
    """The names that the files in question read."""
    own = set().union(*(own_names(trees()[home]) for home in HOMES)) | {"_guesses", "_whole", "_available"}
    return frozenset(name for home in HOMES for node in ast.walk(trees()[home]) for name in names_of(node)) - own - OF_OTHERS


def astray(tree: ast.AST, known: set[str]) -> list[str]:
    """Returns what a file reads of the packages' private names; attributes are theirs if they are neither `known` nor others'."""
    found = []
    for node in ast.walk(tree):
        names = names_of(node)
        if isinstance(node, ast.Constant):
            names = [name for name in names if name in declared()]
        elif isinstance(node, ast.Attribute):
            names = [name for name in names if name in declared() or name not in known | OF_OTHERS]
        found += [f"line {node.lineno}: {name}" for name in names]
    return found


def test_one_file_of_each_package_reads_its_private_names():
    known = set().union(*map(own_names, trees().values()))
    found = {name: astray(tree, known) for name, tree in trees().items() if name not in HOMES}
    assert len(found) > 200 and not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    "program",
    [
        "from torch._ops import OpOverload",
        "import torch._dynamo",
        "from torchmetrics.metric import _anything",
        "x._version",
        "torch._C",
        "self.trainer._results",
        "getattr(metric, '_defaults')",
        "attrgetter('_logger_connector._callback_metrics')",
        "x._a_name_of_nobody",
    ],
)
def test_what_reads_private_names_elsewhere_is_seen(program):
    assert astray(ast.parse(program), {"_results", "_version"})
    assert not astray(ast.parse("self._version; x._own; from os import _exit; import lightning_gnn._own"), {"_own"})


def test_the_files_read_what_they_declare():
    assert {"_version", "_base", "_C", "_current_fx_name", "_Launcher", "_user_args", "_key", *METRICS} <= declared()


def test_the_names_are_in_this_torch():
    """If this fails, read `lightning_gnn/private_torch.py` against the installed version. Importing it has read the others."""
    x, module, norm = torch.ones(2, 2, requires_grad=True), torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)
    view = x.detach().view(4)
    view.add_(1)
    assert private_torch.version_counter(view) == 1 and private_torch.base_of(view) is not None
    assert private_torch.base_of(x) is None and private_torch.graph_task() == -1
    assert private_torch.storage_id(x.untyped_storage()) == private_torch.storage_id(x.detach().untyped_storage())
    assert private_torch.parse_to("cpu", torch.float64)[:2] == (torch.device("cpu"), torch.float64)
    assert not private_torch.profiler_is_on()
    with torch.autograd.profiler.profile():
        assert private_torch.profiler_is_on()
    assert dict(module.named_children()) == getattr(module, private_torch.MODULES) == {}
    assert private_torch.LOAD_HOOKS in vars(module)
    assert not any(private_torch.hooks_of_calls(module))
    module.register_forward_hook(lambda *_: None)
    assert any(private_torch.hooks_of_calls(module))
    x.register_hook(lambda _: None)
    x.register_post_accumulate_grad_hook(lambda _: None)
    assert [len(hooks) for hooks in private_torch.hooks_on_gradient(x)] == [1, 1]
    with pytest.raises(ValueError, match="expected 2D or 3D"):
        private_torch.input_check(norm)(x[0])
    assert isinstance(norm, private_torch.AnyBatchNorm) and private_torch.VERSION in vars(private_torch.TensorBase)
    assert isinstance(torch.nn.InstanceNorm1d(2), private_torch.AnyInstanceNorm)


def test_functions_of_users_have_the_names_of_this_torch():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

    made = Twice.apply(torch.ones(1, requires_grad=True))
    assert getattr(type(made.grad_fn), private_torch.FORWARD_CLASS) is Twice
    operator = torch.library.custom_op(
        "lightning_gnn_tests::thrice", lambda x: 3 * x, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    assert isinstance(getattr(operator, private_torch.OPERATOR).overloadpacket, private_torch.OpOverloadPacket)


def test_the_names_are_in_this_torch_distributed(tmp_path):
    assert callable(private_torch.default_store(dist)) and callable(private_torch.make_group(dist))
    assert callable(private_torch.call_counter(dist.ProcessGroup))
    assert callable(private_torch.barrier_of_agents(agents)) and private_torch.end_of_agents(api)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        before = private_torch.call_counter(dist.group.WORLD)()
        dist.barrier()
        assert private_torch.call_counter(dist.group.WORLD)() == before + 1
    finally:
        dist.destroy_process_group()


def test_the_names_are_in_this_lightning():
    """If this fails, read `lightning_gnn/private_lightning.py` against the installed version."""
    module = pl.LightningModule()
    for name in (private_lightning.HOOK, private_lightning.TRAINER, private_lightning.EXAMPLE):
        assert getattr(module, name) is None
    module.example_input_array = torch.ones(1)
    assert getattr(module, private_lightning.EXAMPLE) is module.example_input_array
    assert getattr(module, private_lightning.COMPILATION) is None
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert private_lightning.results_of(trainer) is None or private_lightning.results_of(trainer) == {}
    assert private_lightning.metrics_so_far(trainer) == {} and callable(private_lightning.checkpoint_parser(trainer))
    assert private_lightning.batches_of(trainer.fit_loop) is None
    since_2_6 = tuple(map(int, pl.__version__.split(".")[:2])) >= (2, 6)
    assert hasattr(trainer.fit_loop.epoch_loop, private_lightning.SIGTERM_CHECK) == since_2_6
    environment = LightningEnvironment()
    setattr(environment, private_lightning.PORT, 12345)
    assert environment.main_port == 12345


def test_the_names_are_in_this_torchmetrics():
    """If this fails, read `lightning_gnn/steps/metrics.py` against the installed version."""
    metric, collection = torchmetrics.MeanMetric(), torchmetrics.MetricCollection([torchmetrics.MaxMetric()])
    assert all(hasattr(metric, name) for name in METRICS) and callable(collection._equal_metric_states)
    metric(2.0)
    assert getattr(metric, FORWARD) == 2 and metric._update_count == 1 and set(metric._defaults) == set(metric._reductions)
    running = Running(torchmetrics.SumMetric(), window=2)
    running(1.0)
    assert running._num_vals_seen == 1


def test_the_names_are_in_this_torch_geometric():
    """`tests/nn/test_binding.py` looks at those of convs."""
    data = HeteroData(a=torch.ones(1))
    data["paper"].x, data["paper", "cites", "paper"].edge_index = torch.ones(1, 1), torch.zeros(2, 1, dtype=torch.long)
    assert dict(private_pyg.graph_attributes(data).items()) == {"a": data.a}
    assert [private_pyg.key_of(store) for store in data.stores] == [None, "paper", ("paper", "cites", "paper")]
    assert private_pyg.key_of(Data(x=torch.ones(1, 1)).stores[0]) is None
