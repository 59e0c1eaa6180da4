"""Threads of the compiled kernels: each piece of work is done once, and by those that have a core."""

import shutil
import subprocess
from pathlib import Path

import pytest

from hatch_build import SOURCES
from tests.tools import missing

HANGS_S = 120
"""Seconds after which the program is taken to wait for ever; it takes a tenth of one."""
PROGRAM = """
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "crew.h"

// How often each piece was done, and whether its thread was one of those allowed.
struct Done {
    std::atomic<int> times[256]{};
    std::atomic<int> pieces{0};
    std::atomic<bool> is_allowed{true};
    int threads;
};

static int faults(int threads) {
    Done done;
    done.threads = threads;
    crew::share(
        [](const void *of, int piece, int pieces, int thread) {
            auto *own = static_cast<Done *>(const_cast<void *>(of));
            own->times[piece]++;
            own->pieces = pieces;
            if (thread >= own->threads) own->is_allowed = false;
        },
        &done, threads);
    int found = !done.is_allowed;
    for (int piece = 0; piece < 256; piece++) found += done.times[piece] != (piece < done.pieces);
    return found;
}

static int joined() {
    while (crew::us.busy.exchange(true)) crew::yield();
    const int count = crew::us.count;
    crew::us.busy = false;
    return count;
}

int main(int, char **arguments) {
    const int absent = std::atoi(arguments[1]), present = std::atoi(arguments[2]);
    crew::us.count = absent;  // as if these had joined, and no core were ever free for them
    for (int number = 0; number < present; number++) std::thread(crew::serve).detach();
    while (joined() < absent + present) crew::yield();
    int found = 0;
    for (int work = 0; work < 20000; work++) found += faults(1 + work % (absent + present + 1));
    std::printf("%d", found);
    std::fflush(stdout);
    _exit(0);  // the threads live as long as the process
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("c++") is None:
        missing("c++ is not installed; scripts/compiler installs Debian's")
    folder = tmp_path_factory.mktemp("crew")
    (folder / "crew.cpp").write_text(PROGRAM)
    command = ["c++", "-std=c++17", "-O2", "-pthread", f"-I{SOURCES[0].parent.resolve()}", "crew.cpp", "-o", "crew"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "crew"


def faults(program: Path, absent_count: int, present_count: int) -> int:
    command = [str(program), str(absent_count), str(present_count)]
    return int(subprocess.check_output(command, text=True, timeout=HANGS_S))


@pytest.mark.parametrize("present_count", [0, 1, 3])
def test_each_piece_of_work_is_done_once_by_a_thread_that_may(program: Path, present_count: int) -> None:
    assert faults(program, 0, present_count) == 0


@pytest.mark.parametrize("present_count", [0, 2])
def test_nobody_waits_for_a_thread_that_has_no_core(program: Path, present_count: int) -> None:
    assert faults(program, 3, present_count) == 0
