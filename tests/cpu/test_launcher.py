"""Kernel arguments as bytes, and the HIP launcher against a double. The simulator: test_simulated_launch.py."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
from types import SimpleNamespace

import pytest
import torch

from cdna_sim import Argument, Descriptor, KernelInfo, Resources
from lightning_indexer import Arch
from lightning_indexer.amd import cdna, launcher_for, pack_arguments, simulates, simulation
from lightning_indexer.amd import hip_runtime as hip_launcher
from lightning_indexer.amd.built import Built
from lightning_indexer.amd.hip_runtime import HipError, HipLauncher
from lightning_indexer.arch import arch_of, assume


def info(*arguments: tuple[str, int, int, str], kernarg_bytes: int = 0) -> KernelInfo:
    return KernelInfo(
        "kernel",
        Descriptor(0, 0, kernarg_bytes, 0, 0, 0, 0, 0, 0, 0),
        tuple(Argument(*argument) for argument in arguments),
        256, 64, (0, 0), Resources(0, 0, 0, 0, 0, 0, 0, None),
    )  # fmt: skip


OUT, COUNT, SCALE = ("out", 0, 8, "global_buffer"), ("count", 8, 4, "by_value"), ("scale", 12, 4, "by_value")
BIG, SMALL = ("big", 16, 8, "by_value"), ("small", 24, 2, "by_value")


class Size(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_int32), ("keys", ctypes.c_int32))


# Kernel arguments as bytes


def test_values_go_to_their_offsets():
    tensor = torch.zeros(4)
    packed = pack_arguments(info(OUT, COUNT, SCALE, BIG, SMALL), (tensor, -7, 0.5, 2**40, 65535))
    assert packed == struct.pack("<QifqH", tensor.data_ptr(), -7, 0.5, 2**40, 65535)


def test_a_view_goes_as_the_address_of_its_first_element():
    tensor = torch.zeros(8, 16)
    assert pack_arguments(info(OUT), (tensor[3, 5:],)) == struct.pack("<Q", tensor.data_ptr() + (3 * 16 + 5) * 4)


def test_padding_is_zero():
    assert pack_arguments(info(("a", 0, 1, "by_value"), ("b", 8, 8, "by_value")), (True, -1)) == (
        b"\x01" + b"\x00" * 7 + b"\xff" * 8
    )


def test_structures_and_doubles():
    packed = pack_arguments(info(("size", 0, 8, "by_value"), ("x", 8, 8, "by_value")), (Size(3, -4), 0.1))
    assert packed == struct.pack("<iid", 3, -4, 0.1)
    assert pack_arguments(info(("size", 0, 8, "by_value")), (b"\x01" * 8,)) == b"\x01" * 8


def test_scratch_pointers_that_triton_appends_are_null():
    scratch = (("", 16, 8, "global_buffer"), ("", 24, 8, "global_buffer"))
    tensor = torch.zeros(1)
    packed = pack_arguments(info(OUT, COUNT, *scratch), (tensor, 1))
    assert packed == struct.pack("<Qi4xQQ", tensor.data_ptr(), 1, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1, 2**32), ValueError, "kernel: argument count: got 4294967296, which 4 bytes do not hold"),
        ((1, -(2**31) - 1), ValueError, "kernel: argument count: got -2147483649, which 4 bytes do not hold"),
        ((1, 2, 3), ValueError, "kernel: got 3 arguments, expected 2"),
        ((1,), ValueError, "kernel: got 1 arguments, expected 2"),
        ((1.0, b"12345"), ValueError, "kernel: argument count: got 5 bytes, expected 4"),
        ((1, torch.zeros(1)), ValueError, "kernel: argument count: got a tensor, expected by_value of 4 bytes"),
        ((1, "2"), TypeError, "kernel: argument count: got str, expected an array, a number, bytes or a ctypes"),
        ((1, None), TypeError, "kernel: argument count: got NoneType"),
    ],
)
def test_what_does_not_fit_is_named(arguments, error, message):
    with pytest.raises(error) as raised:
        pack_arguments(info(OUT, COUNT), arguments)
    assert str(raised.value).startswith(message)


def test_an_argument_without_a_name_goes_by_its_number():
    with pytest.raises(ValueError, match="kernel: argument 1: got a float, expected 2 bytes"):
        pack_arguments(info(OUT, ("", 8, 2, "by_value")), (0, 1.0))


# HIP


class OnGpu(torch.Tensor):
    """A tensor that says it is in the memory of GPU 1."""

    device = torch.device("cuda", 1)

    def data_ptr(self) -> int:
        return 0x7F00_0000_1000


ELF = b"\x7fELF\0 and so on\0"
POINTER, UNSIGNED = ctypes.c_void_p, ctypes.c_uint
ANSWER, MODULE, FUNCTION = 209, 0x1000_0000_0010, 0x1000_0000_0020


class FakeHip:
    """Functions of the C calling convention in place of the runtime's; records what they are called with.

    The kernarg segment is read as the runtime would read it.
    """

    def __init__(self, fail: str = "") -> None:
        self.calls: list[tuple] = []
        self.fail = fail
        for name, *arguments in (
            ("hipModuleLoadData", POINTER, POINTER),
            ("hipModuleGetFunction", POINTER, POINTER, ctypes.c_char_p),
            ("hipModuleLaunchKernel", POINTER, *[UNSIGNED] * 7, POINTER, POINTER, POINTER),
        ):
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(self._recorded(name)))
        self.hipGetErrorName = ctypes.CFUNCTYPE(POINTER, ctypes.c_int)(self._name_of)

    def _recorded(self, name: str):
        def call(*arguments):
            getattr(self, f"_{name}")(*arguments)
            return ANSWER if name == self.fail else 0

        return call

    def _name_of(self, error: int) -> int:
        self.text = ctypes.create_string_buffer(b"hipErrorNoBinaryForGpu" if error == ANSWER else b"?")
        return ctypes.addressof(self.text)

    def _hipModuleLoadData(self, module, image):  # noqa: N802
        self.calls.append(("load", ctypes.string_at(image, len(ELF))))
        POINTER.from_address(module).value = MODULE

    def _hipModuleGetFunction(self, function, module, name):  # noqa: N802
        self.calls.append(("function", module, name))
        POINTER.from_address(function).value = FUNCTION

    def _hipModuleLaunchKernel(self, function, gx, gy, gz, bx, by, bz, lds, stream, parameters, extra):  # noqa: N802
        config = (ctypes.c_void_p * 5).from_address(extra)
        assert (config[0], config[2], config[4]) == (1, 2, 3)
        size = ctypes.c_size_t.from_address(config[3]).value
        segment = ctypes.string_at(config[1], size)
        self.calls.append(("launch", function, (gx, gy, gz), (bx, by, bz), lds, stream, parameters, segment))


@pytest.fixture
def gpu(monkeypatch):
    """What the launcher asks of torch.cuda; the list holds the devices that were made current."""
    entered: list[int] = []

    @contextlib.contextmanager
    def device(index):
        entered.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=0xABC0 + index))
    return entered


class FakeCode:
    def __init__(self, *arguments: tuple[str, int, int, str]) -> None:
        self.elf = ELF
        self.info = info(*arguments)

    def kernel(self, name: str) -> KernelInfo:
        return self.info


def built(dynamic_lds: int = 0) -> Built:
    return Built(FakeCode(OUT, COUNT), "kernel", "", dynamic_lds, "hip", "")  # type: ignore[arg-type]


def test_hip_launch(gpu):
    fake, kernel = FakeHip(), built(dynamic_lds=512)
    launcher = HipLauncher(fake)
    tensor = torch.zeros(2).as_subclass(OnGpu)
    launcher.launch(kernel, (7, 2, 1), 256, (tensor, 9), outputs=("out",))
    launcher.launch(kernel, (7, 2, 1), (64, 2, 1), (tensor, -1), stream=0x1234)
    assert fake.calls == [
        ("load", ELF),
        ("function", MODULE, b"kernel"),
        ("launch", FUNCTION, (7, 2, 1), (256, 1, 1), 512, 0xABC1, None, struct.pack("<Qi", 0x7F00_0000_1000, 9)),
        ("launch", FUNCTION, (7, 2, 1), (64, 2, 1), 512, 0x1234, None, struct.pack("<Qi", 0x7F00_0000_1000, -1)),
    ]
    assert gpu == [1, 1], "the device of the tensors, not the current one"


def test_hip_loads_a_code_object_once_for_each_kernel_and_device(gpu):
    fake = FakeHip()
    launcher = HipLauncher(fake)
    tensor = torch.zeros(2).as_subclass(OnGpu)

    class OnOther(OnGpu):
        device = torch.device("cuda", 0)

    first = built()
    for kernel, argument in ((first, tensor), (first, tensor), (built(), tensor), (first, tensor.as_subclass(OnOther))):
        launcher.launch(kernel, (1, 1, 1), 64, (argument, 0))
    assert sum(call[0] == "load" for call in fake.calls) == 3
    assert gpu == [1, 1, 1, 0]


@pytest.mark.parametrize("call", ["hipModuleLoadData", "hipModuleGetFunction", "hipModuleLaunchKernel"])
def test_hip_errors_name_the_kernel_and_the_call(gpu, call):
    launcher = HipLauncher(FakeHip(fail=call))
    for _ in range(2):  # a kernel that failed to load is not taken for loaded
        with pytest.raises(HipError) as raised:
            launcher.launch(built(), (1, 1, 1), 64, (torch.zeros(2).as_subclass(OnGpu), 0))
        assert str(raised.value).startswith(f"kernel (hip) was not launched: {call}: hipErrorNoBinaryForGpu. ")
        assert "LIGHTNING_INDEXER_BACKEND=triton-portable" in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2), 0), "got tensors on cpu, expected one GPU"),
        ((0, 0), "got tensors on no device, expected one GPU"),
        ((torch.zeros(2), torch.zeros(2).as_subclass(OnGpu)), "expected one GPU"),
    ],
)
def test_hip_needs_tensors_on_one_gpu(gpu, arguments, message):
    fake = FakeHip()
    with pytest.raises(ValueError, match=message):
        HipLauncher(fake).launch(built(), (1, 1, 1), 64, arguments)
    assert fake.calls == []


# Which launcher runs a call


@pytest.fixture
def _simulator(monkeypatch):
    """The launcher alone: it is made where the decoder cannot be installed too (Python 3.10)."""
    monkeypatch.setattr(cdna, "simulator_missing", lambda: None)


@pytest.mark.usefixtures("_simulator")
def test_simulation_forces_its_arch_and_gives_its_launcher(monkeypatch):
    monkeypatch.setenv("LIGHTNING_INDEXER_ARCH", "sm90")
    cpu = torch.device("cpu")
    with simulation("gfx942") as outer:
        assert arch_of("cpu").name == "gfx942"
        assert launcher_for(cpu) is outer
        with simulation("gfx950") as inner:
            assert arch_of(cpu).name == "gfx950"
            assert launcher_for(cpu) is inner
            assert inner is not outer
        assert launcher_for(cpu) is outer
    assert arch_of("cpu").name == "sm90"
    assert launcher_for(cpu) not in (inner, outer)
    assert launcher_for(cpu) is launcher_for(cpu)


@pytest.mark.usefixtures("_simulator")
def test_simulation_ends_with_an_error_too():
    with pytest.raises(KeyError), simulation("gfx942"):
        raise KeyError
    assert arch_of("cpu").name == "cpu"
    for arch in ("gfx000", "gfx1201", "sm90"):
        message = f"arch: got '{arch}', expected one of gfx942, gfx950"
        with pytest.raises(ValueError, match=message), simulation(arch):
            pass
    assert launcher_for(torch.device("cpu")) is launcher_for(torch.device("cpu"))


@pytest.mark.usefixtures("_simulator")
def test_what_is_simulated(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    gfx950, sm90, cpu = (Arch.parse(name) for name in ("gfx950", "sm90", "cpu"))
    assert [simulates(arch) for arch in (gfx950, sm90, cpu)] == [True, False, False]
    # Triton's interpreter was there first, and what asks for it gets it; `simulation` is more explicit.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not simulates(gfx950)
    with simulation("gfx950"):
        assert simulates(gfx950)


def test_assume_is_undone():
    with assume("gfx942") as arch:
        assert arch_of("cuda:3") is arch
        with assume("sm100"):
            assert arch_of("cpu").name == "sm100"
        assert arch_of("cpu").name == "gfx942"
    assert arch_of("cpu").name == "cpu"


def test_what_the_simulator_lacks_is_said(monkeypatch):
    monkeypatch.setattr(cdna, "simulator_missing", lambda: "the simulator needs tinygrad: pip install it")
    with pytest.raises(ModuleNotFoundError, match="the simulator needs tinygrad: pip install it"), simulation("gfx950"):
        pass
    assert arch_of("cpu").name == "cpu"


MAPS = """\
7f00-7f01 r-xp 00000000 08:01 1   {first}
7f01-7f02 r--p 00001000 08:01 1   {first}
7f02-7f03 r-xp 00000000 08:01 2   {second}
7f03-7f04 r-xp 00000000 08:01 3   /usr/lib/libc.so.6
7f04-7f05 rw-p 00000000 00:00 0
"""


def test_the_runtimes_of_a_process(tmp_path):
    first, second = tmp_path / "libamdhip64.so.7", tmp_path / "lib" / "libamdhip64.so.7"
    link, maps = tmp_path / "libamdhip64.so", tmp_path / "maps"
    second.parent.mkdir()
    first.touch()
    second.touch()
    link.symlink_to(first)
    maps.write_text(MAPS.format(first=first, second=link))
    assert hip_launcher._mapped(maps) == [str(first)]
    maps.write_text(MAPS.format(first=first, second=second))
    assert hip_launcher._mapped(maps) == sorted(map(str, (first, second)))
    assert hip_launcher._mapped(tmp_path / "none") == []


def test_a_runtime_that_is_not_found_is_an_error_of_the_first_launch(gpu, tmp_path, monkeypatch):
    """And nothing before it: what a machine has is not asked when a launcher is made, or a backend is selected."""
    launcher = HipLauncher()
    maps = tmp_path / "maps"
    for loaded, said in ((MAPS, "2 are loaded: "), ("", "no libamdhip64 is loaded")):
        maps.write_text(loaded.format(first=tmp_path / "libamdhip64.so.6", second=tmp_path / "libamdhip64.so.7"))
        runtime = functools.partial(_RUNTIME, tmp_path, maps)
        monkeypatch.setattr(hip_launcher, "_runtime", runtime)
        with pytest.raises(HipError) as raised:
            launcher.launch(built(), (1, 1, 1), 64, (torch.zeros(2).as_subclass(OnGpu), 0))
        message = str(raised.value)
        assert message.startswith("kernel (hip) was not launched: the HIP runtime of PyTorch ")
        assert f"{tmp_path / 'libc10_hip.so'}: it is not there; {said}" in message
    maps.write_text(MAPS.format(first=tmp_path / "libamdhip64.so.7", second=tmp_path / "libamdhip64.so.7"))
    (tmp_path / "libamdhip64.so.7").write_text("not a library")
    with pytest.raises(HipError, match=r"was not launched: the HIP runtime of PyTorch .* 1 are loaded"):
        launcher.launch(built(), (1, 1, 1), 64, (torch.zeros(2).as_subclass(OnGpu), 0))


_RUNTIME = hip_launcher._runtime
