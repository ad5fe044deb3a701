"""What the house does not do, found by reading the source.

Each table below is a list of reviewed exceptions: a place (`path:function`), and why it is right there. An entry that
nothing needs any more fails too.
"""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from tests.house.source import DEFINITIONS, Module, dotted, modules

PACKAGE = modules("atorch")
EVERYTHING = [*PACKAGE, *modules("benchmarks", "examples", "tests")]

# `except Exception` and `except BaseException`: whatever a stranger's code raises must be caught here.
BLIND_EXCEPTS: Mapping[str, str] = {
    "atorch/auto/checkpointing.py:_load_extra": "what a user's object raises names the extra that does not fit",
    "atorch/auto/opt_lib/chunk/trace.py:trace_pass": "a forward may fail on fakes in any way; then chunk is refused",
    "atorch/auto/opt_lib/pipeline_parallel/stages.py:split": "raised again, once the model is as it was",
    "atorch/checkpoint/files.py:BackgroundWriter.start.run": "what a save raises is raised by the next call",
    "atorch/auto/verification.py:as_strategy_errors": "what a user's model raises under a strategy names that",
    "atorch/auto/reference_step.py:tried": "what a user's model, data and loss raise is the reason that is told",
    "atorch/auto/planner/dry_runs/step_timing.py:_why_not": (
        "what a user's method, model or optimizer raises is the reason"
    ),
    "atorch/runtime/pipeline/engine.py:LocalStage.forward": "raised when the pass has ended, for which others wait",
    "atorch/auto/planner/dry_runs/fault_barrier.py:FaultBarrier.together": (
        "a candidate that raises is rejected, on all ranks together"
    ),
    "atorch/auto/simulated_candidates.py:_outcome": (
        "a model may fail on fake tensors in any way; the plan stands, and says why not"
    ),
    "atorch/auto/sources/__init__.py:_of_config.subject": "a library's model may fail anyhow; the error has a remedy",
    "atorch/auto/sources/config.py:SampleForm._num_features": "a model may fail on an image; there is a remedy",
    "atorch/checkpoint/files.py:save": "raised again, once the files of the failed save are removed",
    "atorch/distributed/collectives.py:call_on_all_ranks": "raised again on all ranks, which would wait forever",
    "atorch/distributed/collectives.py:all_or_none": "raised again on all ranks, which would wait forever",
    "atorch/distributed/fingerprints.py:facts_of_dataset": (
        "what a user's __len__ raises is no concern of a comparison"
    ),
    "atorch/runtime/loss/reduction_probe.py:ReductionProbe.holds": (
        "a user's loss may fail on a part of a batch; training goes on"
    ),
    "atorch/profiler/trace.py:_of_length": "a model may fail in any way on a short sample; the whole one is traced",
    "atorch/profiler/trace.py:_stepped_alone": "a user's optimizer need not be able to step alone",
    "atorch/profiler/trace.py:_in_16_bits": "a model may fail in any way in 16 bits; it is reckoned from fp32 then",
    "atorch/profiler/trace.py:_run": "a forward may fail on fakes in any way; a real run then shows its faults",
    "atorch/model/deferred_init.py:InitialValues._watch": "a user's function may fail in any way without values",
    "atorch/runtime/loss/reduction_probe.py:ReductionProbe._losses": (
        "a loss may fail on a part of a batch in any way; the warning says so"
    ),
    "atorch/runtime/optimizer/user_optimizer.py:made_small": ("a user's optimizer may refuse small parameters"),
    "atorch/runtime/pipeline/capture/graph_split.py:_export": (
        "a model may resist export in any way; the error says both reasons"
    ),
    "atorch/runtime/pipeline/capture/stage_dataflow.py:_observed": (
        "a loss may fail in any way on fakes, or on a few rows"
    ),
    "atorch/runtime/pipeline/capture/stage_dataflow.py:_without_values": (
        "a forward may fail on fakes in any way; the error says so"
    ),
    "atorch/runtime/pipeline/capture/stage_dataflow.py:route_of": (
        "the same, where a pipeline watches what modules hand over"
    ),
    "atorch/runtime/pipeline/schedules.py:TorchStage.backward_maybe_with_nosync": "raised again, or told to its owner",
    "atorch/runtime/data/batches.py:_Fetched.__init__": ("raised again, and told to others, who would wait forever"),
    "atorch/smp/step.py:_watched": "a function may fail on zeros in any way; real batches show its faults",
    "atorch/smp/steps/runner.py:Runner.run": "raised on all processes at the end of the step",
    "atorch/smp/steps/runner.py:_Work.run": "the same: the others of a pipeline wait for what this one gives",
    "atorch/smp/steps/averaging.py:ShardedPasses.step": "raised again, once the others know that they have to stop",
}

# Module-level objects that change while the program runs.
MODULE_STATE: Mapping[str, str] = {
    "atorch/auto/opt_lib/compile.py:_fused": "a memory of pure results, as below",
    "atorch/auto/opt_lib/module_replace_optimization.py:REPLACEMENTS": "the registry of replacements",
    "atorch/auto/strategy/method.py:METHODS": "the registry of methods",
    "atorch/auto/strategy/method.py:RECIPES": "the registry of recipes",
    "atorch/cost/parallelism.py:_filled": "a memory of pure results, as below",
    "atorch/cost/parallelism.py:_dealt": "a memory of pure results, as below",
    "atorch/cost/parallelism.py:_in_order": "a memory of pure results, as below",
    "atorch/cost/parallelism.py:_sizes": "a memory of pure results, as below",
    "atorch/cost/memory.py:_peak_with_host": "a memory of pure results, as below",
    "atorch/cost/memory_timeline.py:_copy": "a memory of pure results, as below",
    "atorch/cost/memory_timeline.py:_timeline": "a memory of pure results, as below",
    "atorch/cost/pipeline_stages.py:_cut": "a memory of pure results: a search cuts one model thousands of times",
    "atorch/cost/pipeline_stages.py:_heaviest": "a memory of pure results, as above",
    "atorch/distributed/mesh.py:_current": "the current mesh, a ContextVar: parallel_group(name) takes no mesh",
    "atorch/distributed/mesh.py:_last": "the same for autograd's own threads, which see no ContextVar",
    "atorch/distributed/rng.py:_numpy_once": "a memory of pure results: numpy takes 0.25 ms to tell its state",
    "atorch/logs.py:log_once": "what was said once a process; a model has many equal modules",
    "atorch/smp/model_creation.py:_delaying": "the context of delay_param_initialization; each thread has its own",
    "atorch/smp/session.py:_sessions": "smp.rank() and its kin take no argument; what smp.init made, in every thread",
    "atorch/smp/tensor/__init__.py:_inside": "smp.tensor_parallelism() marks what others make inside; a ContextVar",
    "atorch/runtime/memory/recompute.py:_disabled": "disable_checkpointing() takes no argument; a ContextVar, as above",
    "atorch/runtime/memory/recompute.py:_pass": (
        "is_recomputing() takes no argument; a ContextVar, so each thread has its own"
    ),
}

# Assignments to attributes of what is imported.
FOREIGN_ASSIGNMENTS: Mapping[str, str] = {
    "atorch/auto/opt_lib/compile.py:Compile.apply": "torch's compiler reads this flag in every backward pass",
}

# Where the guide sizes would make worse code.
LONG_FILES: Mapping[str, str] = {}
LONG_FUNCTIONS: Mapping[str, str] = {}

LARGE_FOLDERS: Mapping[str, str] = {
    "atorch": "the packages, and the basics that all of them use",
    "atorch/auto": "the entry points, and what they share",
    "atorch/auto/opt_lib": "a method each",
    "atorch/smp": "a documented module each, as in the original",
}

HEADER = re.compile(r'(?:\s|#.*\n)*r?"""(.*?)"""', re.DOTALL)  # a file's docstring; all files need not be parsed
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_HEADER_LINES, MAX_FOLDER_ENTRIES = 400, 60, 30, 15

Finding = tuple[str, str]  # (key in a table of exceptions, the place as editors read it)


def judge(findings: Iterable[Finding], allowed: Mapping[str, str], advice: str) -> None:
    """Fail on findings that are not allowed, and on allowances that are not needed."""
    findings = list(findings)
    new = [place for key, place in findings if key not in allowed]
    unused = sorted(set(allowed) - {key for key, _ in findings})
    assert not new, f"{advice}:\n" + "\n".join(new)
    assert not unused, "these exceptions are not needed any more:\n" + "\n".join(unused)


def at(module: Module, found: Iterable[tuple[ast.AST, str]]) -> list[Finding]:
    return [(f"{module.path}:{scope}", module.at(node)) for node, scope in found]


def prints(module: Module) -> list[Finding]:
    return at(module, (found for found in module.nodes(ast.Call) if dotted(found[0].func) == "print"))


def blind_excepts(module: Module) -> list[Finding]:
    def is_blind(handler: ast.ExceptHandler) -> bool:
        caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        return any(kind is None or dotted(kind) in ("Exception", "BaseException") for kind in caught)

    return at(module, (found for found in module.nodes(ast.ExceptHandler) if is_blind(found[0])))


def environment_accesses(module: Module) -> list[Finding]:
    names = {"os.environ", "os.getenv", "os.putenv", "os.unsetenv"}
    found = [found for found in module.nodes(ast.Attribute) if dotted(found[0]) in names]
    for node, scope in module.nodes(ast.ImportFrom):
        if node.module == "os" and {f"os.{alias.name}" for alias in node.names} & names:
            found.append((node, scope))
    return at(module, found)


MUTABLE_MAKERS = {"dict", "list", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict", "count"}
STATEFUL_MAKERS = {"ContextVar", "Registry", "local", "Lock", "RLock", "WeakKeyDictionary", "WeakValueDictionary"}
CACHES = {"cache", "lru_cache"}
READ_ONLY = {"Mapping", "Sequence", "Set", "Collection", "Iterable"}


def module_state(module: Module) -> list[Finding]:
    """Mutable values of module level, `global` statements and caches.

    A constant table is annotated with a type that cannot be written to, so that mypy guards it.
    """
    found = list(module.nodes(ast.Global))
    for statement, scope in module.nodes(ast.Assign, ast.AnnAssign):
        if not scope and _is_state(statement):
            name = dotted(statement.targets[0] if isinstance(statement, ast.Assign) else statement.target)
            found += [(statement, name)] if name != "__all__" else []
    for node, _ in module.nodes(ast.FunctionDef):
        decorators = [item.func if isinstance(item, ast.Call) else item for item in node.decorator_list]
        if any(dotted(decorator).rpartition(".")[2] in CACHES for decorator in decorators):
            found.append((node, node.name))
    return at(module, found)


def _is_state(statement: ast.Assign | ast.AnnAssign) -> bool:
    value = statement.value
    if isinstance(value, ast.Call):
        maker = value.func.value if isinstance(value.func, ast.Subscript) else value.func
        name = dotted(maker).rpartition(".")[2]
        if name in STATEFUL_MAKERS:
            return True
        is_mutable = name in MUTABLE_MAKERS
    else:
        is_mutable = isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)
    annotation = statement.annotation if isinstance(statement, ast.AnnAssign) else None
    outer = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return is_mutable and (outer is None or dotted(outer).rpartition(".")[2] not in READ_ONLY)


def foreign_assignments(module: Module) -> list[Finding]:
    """Assignments to attributes of imported names: patches, and settings of other packages."""
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node, _ in module.nodes(ast.Import, ast.ImportFrom)
        for alias in node.names
    }
    changed = [
        (node, scope, target)
        for node, scope in module.nodes(ast.Assign, ast.Delete, ast.AugAssign, ast.AnnAssign)
        for target in getattr(node, "targets", None) or [node.target]
    ]
    for node, scope in module.nodes(ast.Call):
        if dotted(node.func) in ("setattr", "delattr") and node.args:
            changed.append((node, scope, ast.Attribute(node.args[0], "")))
    return at(
        module,
        (
            (node, scope)
            for node, scope, target in changed
            if any(
                isinstance(part, ast.Attribute) and dotted(part).partition(".")[0] in imported
                for part in _unpacked(target)
            )
        ),
    )


def _unpacked(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        return [part for element in target.elts for part in _unpacked(element)]
    return [target]


UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load"}


def unsafe_readers(module: Module) -> list[Finding]:
    """Unpickling, eval, `torch.load` without `weights_only`: whatever can run code out of a file."""

    def is_unsafe(node: ast.Call | ast.Import | ast.ImportFrom) -> bool:
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            return name in UNSAFE_CALLS or (name == "torch.load" and not _has_true(node, "weights_only"))
        names = {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            return not names.isdisjoint(UNSAFE_MODULES)
        return node.module in UNSAFE_MODULES or (node.module == "torch" and "load" in names)

    nodes = module.nodes(ast.Call, ast.Import, ast.ImportFrom)
    return at(module, (found for found in nodes if is_unsafe(found[0])))


def _has_true(call: ast.Call, keyword: str) -> bool:
    values = [given.value for given in call.keywords if given.arg == keyword]
    return any(isinstance(value, ast.Constant) and value.value is True for value in values)


def version_branches(module: Module) -> list[Finding]:
    """Comparisons of a package's version: there is one floor, stated in pyproject.toml."""
    ends = (".__version__", ".TorchVersion", "torch_version")
    compared = module.nodes(ast.Compare)
    return at(module, (found for found in compared if any(dotted(part).endswith(ends) for part in ast.walk(found[0]))))


def long_files(module: Module) -> list[Finding]:
    lines = module.text.count("\n")
    return [(module.path, f"{module.path}: {lines} lines")] if lines > MAX_FILE_LINES else []


def long_functions(module: Module) -> list[Finding]:
    """Functions whose body, signature and docstring not counted, is longer than the guide size."""
    found = []
    for node, scope in module.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        body = node.body[1:] if ast.get_docstring(node) else node.body
        lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
        if lines > MAX_FUNCTION_LINES:
            name = f"{scope}.{node.name}" if scope else node.name
            found.append((f"{module.path}:{name}", f"{module.at(node)}: {name}, {lines} lines"))
    return found


def of(check: Callable[[Module], list[Finding]], within: Iterable[Module] = PACKAGE) -> list[Finding]:
    return [finding for module in within for finding in check(module)]


def test_prints_only_in_the_command_line():
    judge(of(prints, (m for m in PACKAGE if not m.path.startswith("atorch/cli/"))), {}, "log, or return a report")


def test_excepts_name_what_they_catch():
    judge(of(blind_excepts), BLIND_EXCEPTS, "catch what is expected, or add a reviewed line to BLIND_EXCEPTS")


def test_environment_variables_are_read_in_one_file():
    outside = (module for module in PACKAGE if module.path != "atorch/distributed/world.py")
    judge(of(environment_accesses, outside), {}, "take an argument; torchrun's variables are read by distributed.world")


def test_no_module_state():
    judge(of(module_state), MODULE_STATE, "annotate a constant table as Mapping, Sequence or Set; pass state along")


def test_nothing_imported_is_changed():
    judge(of(foreign_assignments), FOREIGN_ASSIGNMENTS, "wrap or subclass; nothing of another module is assigned to")


def test_no_file_can_run_code():
    allowed = {"atorch/checkpoint/foreign.py:": "DCP's metadata is a pickle, read by an exact list of names"}
    judge(of(unsafe_readers), allowed, "read JSON, safetensors, or torch.load(..., weights_only=True)")


def test_no_version_branches():
    judge(of(version_branches), {}, "raise the floor in pyproject.toml instead")


def test_files_are_short():
    judge(
        of(long_files), LONG_FILES, f"over {MAX_FILE_LINES} lines: split by idea, or add a reviewed line to LONG_FILES"
    )


def test_functions_are_short():
    advice = f"over {MAX_FUNCTION_LINES} lines of body: split, or add a reviewed line to LONG_FUNCTIONS"
    judge(of(long_functions), LONG_FUNCTIONS, advice)


def test_every_file_says_what_it_is():
    headers = {module.path: HEADER.match(module.text) for module in EVERYTHING if module.text.strip()}
    assert not [path for path, header in headers.items() if not header], "a file opens with a docstring"
    long = [path for path, header in headers.items() if header and header[1].count("\n") > MAX_HEADER_LINES]
    assert not long, f"a header has at most {MAX_HEADER_LINES} lines"


def test_folders_are_small():
    entries: dict[str, set[str]] = {}
    for module in PACKAGE:
        parts = Path(module.path).parts
        for depth in range(1, len(parts)):
            if parts[depth] != "__init__.py":
                entries.setdefault("/".join(parts[:depth]), set()).add(parts[depth])
    found = [(folder, f"{folder}: {len(held)}") for folder, held in entries.items() if len(held) > MAX_FOLDER_ENTRIES]
    judge(found, LARGE_FOLDERS, f"over {MAX_FOLDER_ENTRIES} entries: group them, or add a line to LARGE_FOLDERS")


def test_a_public_class_name_means_one_thing():
    """Aliases of types count as classes."""
    places: dict[str, list[str]] = {}
    for module in PACKAGE:
        for node in module.tree.body:
            name = node.name if isinstance(node, ast.ClassDef) else ""
            if isinstance(node, ast.Assign | ast.AnnAssign):
                target = dotted(node.targets[0] if isinstance(node, ast.Assign) else node.target)
                name = target if target[:1].isupper() and not target.isupper() else ""
            if name and not name.startswith("_"):
                places.setdefault(name, []).append(module.at(node))
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_docstrings_open_with_a_noun_or_a_verb():
    riddle = re.compile(r"(What|Which|Whether|How|Where|When|Why|Who|Whoever|Whose)\b")
    found = [
        module.at(node)
        for module in PACKAGE
        for node, _ in module.nodes(ast.Module, *DEFINITIONS)
        if riddle.match(ast.get_docstring(node) or "")
    ]
    assert not found, "say what it is, or what it does"


METAPHORS = ("convict", "course", "crew", "door", "foresee", "foresight", "foretold", "ghost", "twin", "understudy")


def test_no_metaphor_names_a_thing():
    used = re.compile(rf"(?<![A-Za-z])(?<!of )({'|'.join(METAPHORS)})s?(?![a-z])", re.IGNORECASE)
    found = {module.path: {word.lower() for word in used.findall(module.text)} for module in PACKAGE}
    assert not {path: words for path, words in found.items() if words}, "take the field's term"


def test_no_loop_variable_is_called_each():
    names = ((module, node) for module in PACKAGE for node, _ in module.nodes(ast.Name))
    found = [module.at(node) for module, node in names if node.id == "each" and isinstance(node.ctx, ast.Store)]
    assert not found, "name the thing"


def test_names_say_something():
    vague = re.compile(r"(^|_)(utils?|helpers?|common|misc|v\d+|new|old|tmp)$")
    assert not [m.path for m in PACKAGE if any(vague.search(part) for part in m.name.split("."))]


def test_nothing_is_left_for_later():
    marks = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")
    left = [
        f"{module.path}:{token.start[0]}"
        for module in EVERYTHING
        if marks.search(module.text)
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline)
        if token.type in (tokenize.COMMENT, tokenize.STRING) and marks.search(token.string)
    ]
    assert not left, "do it, or write an issue:\n" + "\n".join(left)


@pytest.mark.parametrize(
    ("check", "bad", "good"),
    [
        (prints, "print(1)", "log(1)"),
        (blind_excepts, "try:\n    f()\nexcept:\n    pass", "try:\n    f()\nexcept KeyError:\n    pass"),
        (blind_excepts, "try:\n    f()\nexcept (OSError, Exception):\n    pass", "raise Exception"),
        (environment_accesses, "import os\nos.environ['A']", "import os\nos.path"),
        (environment_accesses, "from os import getenv", "from os import path"),
        (module_state, "seen = {}", "def f():\n    seen = {}"),
        (module_state, "seen: dict[str, int] = {}", "SIZES: Mapping[str, int] = {'a': 1}"),
        (module_state, "current: ContextVar[int] = ContextVar('current')", "__all__ = ['a']"),
        (module_state, "def f():\n    global a\n    a = 1", "KINDS = frozenset({1})"),
        (module_state, "@functools.cache\ndef f(): ...", "@property\ndef f(): ..."),
        (foreign_assignments, "import torch\ntorch.nn.Linear.forward = f", "import torch\nx = torch.nn"),
        (foreign_assignments, "from torch import nn\na, nn.Linear = 1, 2", "def f(self):\n    self.nn = 1"),
        (foreign_assignments, "import torch\nsetattr(torch, 'a', 1)", "setattr(module, 'a', 1)"),
        (unsafe_readers, "import pickle", "import json"),
        (unsafe_readers, "import torch\ntorch.load(f)", "import torch\ntorch.load(f, weights_only=True)"),
        (unsafe_readers, "eval('1')", "model.eval()"),
        (version_branches, "import torch\nif Version(torch.__version__) > a: pass", "version = torch.__version__"),
        (long_functions, "def f():\n" + "    a = 1\n" * 61, "def f():\n    '''" + "a\n" * 60 + "'''\n    return 1"),
    ],
)
def test_the_checks_find_what_they_look_for(check, bad, good):
    assert check(Module("atorch/x.py", bad))
    assert not check(Module("atorch/x.py", good))
