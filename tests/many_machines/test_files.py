"""The files that start a training on many machines: their syntax, and every option in them."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import yaml
from torch.distributed.run import get_args_parser

from many_machines.runs import FOLDER, program

ROOT = FOLDER.parents[1]
PAGE = ROOT / "docs" / "many_machines.md"


def parsed(arguments: list[str], variables: dict[str, str]) -> tuple[Namespace, Namespace]:
    with mock.patch.dict(os.environ, variables):
        launcher = get_args_parser().parse_args(arguments)  # reads defaults of the environment
    assert launcher.training_script.endswith("examples/launch/train.py")
    return launcher, program("train").read_options(launcher.training_script_args)


def rendezvous(launcher: Namespace) -> dict[str, str]:
    return dict(pair.split("=") for pair in launcher.rdzv_conf.split(","))


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Make a folder of commands that write down how they were called, or play their part."""
    folder = tmp_path / "tools"
    folder.mkdir()
    writes = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    played = {
        "python": f'exec {sys.executable} -c "{writes}" "$@"',
        "scontrol": '[ "$*" = "show hostnames node[7-8]" ] && echo node7 && echo node8',
        "srun": 'echo "$1" >&2; shift; exec "$@"',
    }
    for name, text in played.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(stat.S_IRWXU)
    return folder


def called(script: str, tools: Path, variables: dict[str, str], *options: str) -> Any:
    """Run a script to its end; return the arguments and the environment that python is given."""
    done = subprocess.run(
        ["bash", str(FOLDER / script), *options],
        cwd=ROOT,
        env={"PATH": f"{tools}:{os.environ['PATH']}"} | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_torchrun_is_told_about_the_nodes(tools: Path) -> None:
    variables = {"HEAD": "node0", "NODES": "2:4", "RANKS": "8", "PORT": "1234", "JOB": "x"}
    arguments, environment = called("torchrun.sh", tools, variables, "--steps", "7")
    assert arguments[:2] == ["-m", "torch.distributed.run"]
    launcher, options = parsed(arguments[2:], {})
    assert (launcher.nnodes, launcher.nproc_per_node) == ("2:4", "8")
    assert (launcher.rdzv_backend, launcher.rdzv_endpoint) == ("c10d", "node0:1234")
    assert (launcher.rdzv_id, launcher.max_restarts, launcher.local_addr) == ("x", 10, None)
    assert rendezvous(launcher) == {
        "join_timeout": "1800",
        "keep_alive_interval": "5",
        "keep_alive_max_attempt": "3",
    }
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert options.steps == 7


def test_the_node_of_that_address_hosts_the_rendezvous(tools: Path) -> None:
    for address, hosts in (("10.0.0.1", "1"), ("10.0.0.2", None)):
        variables = {"HEAD": "10.0.0.1", "ADDRESS": address, "PATIENCE": "60"}
        arguments, _ = called("torchrun.sh", tools, variables)
        launcher, _ = parsed(arguments[2:], {})
        assert launcher.local_addr == address
        assert rendezvous(launcher).get("is_host") == hosts
        assert rendezvous(launcher)["keep_alive_interval"] == "20"


# Options of sbatch, as its manual lists them: those with a value and those without.
SBATCH = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time"}
SBATCH |= {"open-mode", "output"}
SBATCH_FLAGS = {"requeue"}


def test_slurm_starts_torchrun_on_each_node(tools: Path) -> None:
    text = (FOLDER / "slurm.sbatch").read_text()
    asked = re.findall(r"^#SBATCH --([a-z-]+)(=\S+)?$", text, re.MULTILINE)
    assert {name for name, value in asked if value} == SBATCH
    assert {name for name, value in asked if not value} == SBATCH_FLAGS
    assert len(asked) == text.count("#SBATCH")

    variables = {
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "91234",
        "SLURM_RESTART_COUNT": "1",
    }
    arguments, _ = called("slurm.sbatch", tools, variables, "--checkpoint-dir", "/shared/run")
    launcher, options = parsed(arguments[2:], {})
    assert (launcher.nnodes, launcher.nproc_per_node) == ("2", "auto")
    assert (launcher.rdzv_endpoint, launcher.rdzv_id) == ("node7:29734", "91234-1")
    assert options.checkpoint_dir == Path("/shared/run")


def test_kubernetes_and_its_operator_tell_torchrun_the_rest() -> None:
    claim, job = yaml.safe_load_all((FOLDER / "pytorchjob.yaml").read_text())
    assert (claim["kind"], job["kind"]) == ("PersistentVolumeClaim", "PyTorchJob")
    assert job["apiVersion"] == "kubeflow.org/v1"
    elastic, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert elastic["minReplicas"] <= worker["replicas"] <= elastic["maxReplicas"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    assert container["command"] == ["python", "-m", "torch.distributed.run"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == elastic["nProcPerNode"]

    # What the operator makes of elasticPolicy.
    said = {
        "PET_RDZV_BACKEND": elastic["rdzvBackend"],
        "PET_RDZV_ID": elastic["rdzvId"],
        "PET_RDZV_ENDPOINT": "train-worker-0:23456",
        "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
        "PET_NPROC_PER_NODE": str(elastic["nProcPerNode"]),
        "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
    }
    launcher, options = parsed(container["args"], said)
    assert (launcher.nnodes, launcher.nproc_per_node) == ("2:4", "8")
    assert (launcher.rdzv_endpoint, launcher.rdzv_id) == ("train-worker-0:23456", "train")
    assert set(rendezvous(launcher)) == {
        "join_timeout",
        "keep_alive_interval",
        "keep_alive_max_attempt",
    }
    for nodes in range(elastic["minReplicas"], elastic["maxReplicas"] + 1):
        assert options.batch % (nodes * elastic["nProcPerNode"]) == 0
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]

    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert volumes.keys() == mounts.keys()
    claimed = volumes["checkpoints"]["persistentVolumeClaim"]["claimName"]
    assert claimed == claim["metadata"]["name"]
    assert options.checkpoint_dir.is_relative_to(mounts["checkpoints"])


def ray() -> dict[str, ModuleType]:
    """Return modules that remember what Ray was asked for."""
    train, torch = mock.MagicMock(), mock.MagicMock()
    for name in ("ScalingConfig", "RunConfig", "FailureConfig"):
        setattr(train, name, lambda **asked: asked)
    torch.TorchConfig = lambda **asked: asked
    return {"ray": mock.MagicMock(), "ray.train": train, "ray.train.torch": torch}


def test_ray_is_asked_for_workers_that_train(tmp_path: Path) -> None:
    modules, folder = ray(), str(tmp_path / "run")
    with mock.patch.dict(sys.modules, modules):
        program("ray_train").main(
            ["--workers", "3", "--storage", "/s", "--", "--steps", "2", "--checkpoint-dir", folder]
        )
    trainer = modules["ray.train.torch"].TorchTrainer
    (job,), asked = trainer.call_args
    assert asked["torch_config"] == {"backend": "gloo"}
    assert asked["scaling_config"] == {"num_workers": 3, "use_gpu": False}
    assert asked["run_config"] == {
        "name": "train",
        "storage_path": "/s",
        "failure_config": {"max_failures": 10},
    }
    trainer.return_value.fit.assert_called_once_with()
    given = asked["train_loop_config"]
    assert given == {
        "arguments": ["--steps", "2", "--checkpoint-dir", folder],
        "folder": str(FOLDER),
    }
    with mock.patch.dict(sys.modules, {"train": mock.MagicMock()}), mock.patch("sys.path", []):
        job(given)
        sys.modules["train"].main.assert_called_once_with(given["arguments"])


def test_the_page_names_each_file_and_variable() -> None:
    text = PAGE.read_text()
    for file in FOLDER.iterdir():
        if file.is_file():
            assert f"examples/launch/{file.name}" in text, file
    script = (FOLDER / "torchrun.sh").read_text()
    for variable in re.findall(r"^# ([A-Z]+) +", script, re.MULTILINE):
        assert f"`{variable}`" in text or f"{variable}=" in text, variable


def test_the_commands_on_the_page_are_those_of_the_files(tools: Path) -> None:
    """Each line of a code block that starts a file of ours is run, up to python itself."""
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if "torchrun.sh" in line]
    assert len(lines) >= 2
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=ROOT,
            env={"PATH": f"{tools}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        parsed(json.loads(done.stdout)[0][2:], {})
