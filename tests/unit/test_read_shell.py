"""Launch scripts are followed, never run: every spelling that people use ends in the same words."""

from __future__ import annotations

import random

import pytest

from planner.errors import InputError
from planner.reading.texts.shell import Script, entry_scripts, launches, read_script


def read(text: str, **others: str) -> Script:
    return read_script(
        {"run.sh": text, **{name.replace("_sh", ".sh"): value for name, value in others.items()}}, "run.sh"
    )


def words(text: str, **others: str) -> list[str]:
    """The words of the last command."""
    return [word.text for word in read(text, **others).commands[-1].words]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1\npython x.py --a $A ${A} \"$A\" '$A'", ["--a", "1", "1", "1", "$A"]),
        ('python x.py ${A:-8} ${B:-"16"} ${C-x}', ["8", "16", "x"]),
        ('S="--a ${H:-"localhost"} --b 2"\npython x.py $S', ["--a", "localhost", "--b", "2"]),
        ("L=(--a 1 # why\n  # --b 2\n --c='x y'\n)\npython x.py ${L[@]}", ["--a", "1", "--c=x", "y"]),
        ("L=(--a 1\n --c='x y')\npython x.py \"${L[@]}\"", ["--a", "1", "--c=x y"]),
        ("L=(--a)\nL+=(--b 2)\npython x.py ${L[@]}", ["--a", "--b", "2"]),
        ('S="--a"\nS+=" --b"\npython x.py $S', ["--a", "--b"]),
        ("python x.py \\\n  --a 1 \\\n  --b 2", ["--a", "1", "--b", "2"]),
        ("python x.py --a 1 $@", ["--a", "1"]),
        ('python x.py --a 1 "$@" ${NOTHING[@]}', ["--a", "1"]),
        ("A=1; B=2   # two\npython x.py $A$B", ["12"]),
        ("export A=3\nexport B=4 C=5\npython x.py $A $B $C", ["3", "4", "5"]),
        ("G=8\nN=4\nW=$(($G*$N))\npython x.py $W $((G*N/2))", ["32", "16"]),
        ('if [[ -n "${X:-}" ]]; then A=(--x); else A=(--y); fi\npython x.py ${A[@]}', ["--y"]),
        ('if [ -z "$X" ]; then A=--x; fi\npython x.py $A', ["--x"]),
        ("M=7b\nif [ $M == 70b ]; then L=80; elif [ $M == 7b ]; then L=32; else L=1; fi\npython x.py $L", ["32"]),
        ("M=2\nif [[ $M -gt 1 && -n $M ]]; then L=a; fi\npython x.py $L", ["a"]),
        ("X=1\n[[ -n $X ]] && A=yes\n[[ -z $X ]] && A=no\npython x.py $A", ["yes"]),
        ("A=1 B=2 python x.py", []),
        ("cat <<EOF > f\npython y.py --no\nEOF\npython x.py --yes", ["--yes"]),
        ("python x.py --a 1 2>&1 | tee log", None),
        ("python x.py --a 1 > out.log 2>&1", ["--a", "1"]),
        ("run() {\n python x.py --a $1\n}\nrun 3", None),
        ('CMD="python x.py --a 1"\n$CMD', ["--a", "1"]),
        ('eval "python x.py --a 1"', ["--a", "1"]),
        ("for N in 1 2; do python x.py --n $N; done", ["--n", "1"]),
        ("case $1 in\n a) python y.py ;;\nesac\npython x.py --z", ["--z"]),
        ("python x.py --freq '([0]*3+[1]*58)' --layout 'Et*2|tL'", ["--freq", "([0]*3+[1]*58)", "--layout", "Et*2|tL"]),
        ("A=(\n --x 1\n)\r\npython x.py ${A[@]}\r\n", ["--x", "1"]),
        ("run() {\n python x.py --a $1 --b ${2:-9}\n}\nrun 3", ["--a", "3", "--b", "9"]),
        ("function run\n{\n local T=$1\n python x.py --a $T ${@:2}\n}\nrun 3 --b 4", ["--a", "3", "--b", "4"]),
        ('add() { A+=("$@"); }\n' + "add --k 1\n" * 60 + "python x.py ${A[@]}", ["--k", "1"] * 60),
        ("f() { f; f; }\nf\npython x.py", []),
        ("never() { exit 1; }\npython x.py --z", ["--z"]),
        ("M=7b\ncase $M in\n 7b|8b) L=32 ;;\n *) L=80 ;;\nesac\npython x.py --l $L", ["--l", "32"]),
        ("M=x\ncase $M in\n 7b) L=32 ;;\n *) L=80 ;;\nesac\npython x.py --l $L", ["--l", "80"]),
        ("IFS=',' read -r T P <<< '4,2'\npython x.py --t $T --p $P", ["--t", "4", "--p", "2"]),
        ("read -r -a A <<< '4 2'\npython x.py ${A[1]} ${A[0]}", ["2", "4"]),
        ("T=3\nread -r -d '' B <<'EOF' || true\npython x.py --t $T\nEOF\nsrun bash -c \"$B\"", ["--t", "3"]),
        ('T=3\ncat > go.sh <<EOF\npython x.py --t $T "a b"\nEOF\nbash go.sh', ["--t", "3", "a b"]),
        ('cat > go.sh <<EOF\npython x.py --t \\"a\nEOF\nbash go.sh', ["--t", '"a']),
        ("T=3\nA=$(cat <<EOF\n--t $T\n--u\nEOF\n)\npython x.py $A", ["--t", "3", "--u"]),
        ("#SBATCH --nodes=4\n#SBATCH --gpus-per-node=8\npython x.py $((SLURM_NNODES * SLURM_GPUS_PER_NODE))", ["32"]),
        ("C='python x.py --h $(hosts | head -n 1) --a 1'\nbash -c \"$C\"", ["--h", "$(hosts | head -n 1)", "--a", "1"]),
        ('C="python x.py --h $(hosts | head -n 1) --a 1"\n$C', ["--h", "$(hosts | head -n 1)", "--a", "1"]),
    ],
)
def test_words(text: str, expected: list[str] | None) -> None:
    """The arguments of x.py, whatever the script does around it."""
    script = read(text)
    found = [[word.text for word in launch.arguments] for launch in launches(script) if launch.script]
    if expected is not None:
        assert found == [expected]
    else:
        assert found


def test_unknown_values_are_marked() -> None:
    """Variables that nobody sets and outputs of commands stay visible in the words that they reach."""
    script = read('D=$DATA/x\nN=$(wc -l < hosts)\npython x.py --d $D --n "$N" --m ${M:?set it} --k ok')
    (launch,) = launches(script)
    values = {launch.arguments[i].text: launch.arguments[i + 1] for i in range(0, len(launch.arguments), 2)}
    assert values["--d"].unset == ("DATA",)
    assert values["--d"].text == "$DATA/x"
    assert values["--n"].unset == ("(wc -l < hosts)",)
    assert values["--m"].unset == ("M",)
    assert values["--k"].unset == ()


def test_an_unknown_value_is_one_word() -> None:
    """What a command prints is not split at the spaces and bars of the command, however often the text is read."""
    script = read(
        'H=$(scontrol show hostnames "$N" | head -n 1)\nA="--m $H:6000 --k 1"\nB="$A"\nbash -c "python x.py $B"'
    )
    (launch,) = launches(script)
    assert [word.text.partition("(")[0] for word in launch.arguments] == ["--m", "$", "--k", "1"]
    assert launch.arguments[1].text.endswith("| head -n 1):6000")
    assert [word.text for word in script.arrays["A"]][2:] == ["--k", "1"]


def test_variables_that_may_have_a_value() -> None:
    """A branch on an argument or on a command's output, or a missing file, may set them; an environment variable that
    nobody sets is empty, as the machine starts."""
    chosen = read("P=$1\nif [ $P = bf16 ]; then O=--bf16; elif [ $P = fp16 ]; then O=--fp16; fi\npython x.py $O")
    assert chosen.doubtful == {"O"}
    cased = read("case $(hostname) in\n a*) O=--bf16 ;;\nesac\npython x.py $O")
    assert cased.doubtful == {"O"}
    assert not read('if [ -n "$DEBUG" ]; then O=--debug; fi\npython x.py $O').doubtful
    assert not read("U=no\nif [ $U = yes ]; then O=--debug; fi\npython x.py $O").doubtful
    missing = read("source models/big.sh\npython x.py ${MODEL[@]}")
    assert missing.doubtful == {"MODEL"}
    assert [word.text for word in missing.commands[-1].words] == ["python", "x.py", "$MODEL"]
    assert not read("source ~/.bashrc\npython x.py $EXTRA").doubtful


def test_arguments_of_another_script() -> None:
    """The numbers of a script that is started with arguments."""
    script = read("bash inner.sh 4 2", inner_sh="TP=$1\nPP=${2}\npython x.py --tp $TP --pp $PP --n ${10}")
    (launch,) = launches(script)
    assert [word.text for word in launch.arguments] == ["--tp", "4", "--pp", "2", "--n", "${10}"]


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("deepspeed --num_gpus 2 x.py", 2),
        ("deepspeed --num_gpus=8 --num_nodes 4 x.py", 32),
        ("deepspeed --hostfile hosts x.py", None),
        ("deepspeed --include localhost:0,1,3 x.py", 3),
        ("deepspeed --include a:0,1@b:0,1 x.py", 4),
        ("deepspeed --include a@b x.py", None),
        ("torchrun --nproc-per-node 4 x.py", 4),
        ("python x.py", None),
    ],
)
def test_gpus_of_a_launch(text: str, gpus: int | None) -> None:
    """A launcher without the options that spread it stays on its node."""
    (launch,) = launches(read(text))
    assert launch.gpus == gpus


def test_places() -> None:
    """Each word remembers the line that wrote it, also through arrays."""
    (launch,) = launches(read('A=(\n  --x 1\n  --y 2\n)\npython x.py "${A[@]}" --z'))
    assert [word.where for word in launch.arguments if word.text.startswith("--")] == [
        "run.sh:2",
        "run.sh:3",
        "run.sh:5",
    ]


@pytest.mark.parametrize(
    ("text", "launcher", "nodes", "per_node", "gpus"),
    [
        ("torchrun --nproc_per_node 8 --nnodes=4 x.py --a", "torchrun", 4, 8, 32),
        ("torchrun --standalone --nproc-per-node 8 x.py --a", "torchrun", 1, 8, 8),
        ("python -m torch.distributed.launch --nproc_per_node 4 --nnodes 2 x.py --a", "torchrun", 2, 4, 8),
        ("python3 -u -m torch.distributed.run --nnodes 1:4 --nproc-per-node 8 -m pkg.train --a", "torchrun", 4, 8, 32),
        ("#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\nsrun python x.py --a", "srun", 4, 8, 32),
        ("#SBATCH -N 4\nsrun torchrun --nnodes $N --nproc_per_node 8 x.py --a", "torchrun", 4, 8, 32),
        ("mpirun -np 16 -npernode 8 python x.py --a", "mpirun", None, 8, 16),
        ("srun -n 16 --gpus-per-node 8 bash -c 'python x.py --a'", "srun", None, 8, 16),
        ('srun -N 4 --ntasks-per-node=8 sh -c "python -u x.py --a"', "srun", 4, 8, 32),
        ("torchrun --nproc_per_node=8 x.py --a", "torchrun", 1, 8, 8),
        ("python x.py --a", "python", None, None, None),
        ("W=${NNODES:-2}\ntorchrun --nnodes $W --nproc-per-node $PROC x.py --a", "torchrun", 2, None, None),
    ],
)
def test_launchers(text: str, launcher: str, nodes: int | None, per_node: int | None, gpus: int | None) -> None:
    """Who starts the script, with how many processes."""
    (launch,) = launches(read(text))
    assert [word.text for word in launch.arguments] == ["--a"]
    assert (launch.launcher, launch.nodes, launch.per_node, launch.gpus) == (launcher, nodes, per_node, gpus)


def test_environment() -> None:
    """Exported variables, and those before the command."""
    (launch,) = launches(read("export A=1\nB=2\nC=3 python x.py"))
    assert launch.environment == {"A": "1", "C": "3"}


def test_files_that_belong_together() -> None:
    """Sourced and started files are followed if they were given, and named if not."""
    files = {
        "job.sbatch": "srun bash ./run.sh",
        "run.sh": "source ./a.sh\nsource ./gone.sh\npython x.py $A",
        "a.sh": "A=1",
    }
    assert entry_scripts(files) == ["job.sbatch"]
    script = read_script(files, "job.sbatch")
    assert [word.text for word in launches(script)[0].arguments] == ["1"]
    assert script.missing == ["run.sh:2 (source ./gone.sh)"]
    assert read_script({"run.sh": "source ./run.sh\npython x.py"}, "run.sh").commands


@pytest.mark.parametrize("text", ["A='x", 'A="x', "A=(1 2", "A=${B", "A=$(ls", "A=`ls"])
def test_unclosed(text: str) -> None:
    """What never closes is refused with its line."""
    with pytest.raises(InputError, match=r"never closed") as caught:
        read("B=1\n" + text)
    assert str(caught.value.where).startswith("run.sh:2")


@pytest.mark.parametrize(
    "text",
    ["A=x\n" + 'A="$A$A"\n' * 60 + "python x.py $A", "B=${A:-" * 100 + "}" * 100, "{ " * 100, "if true; then\n" * 100],
)
def test_scripts_without_end(text: str) -> None:
    """A script that grows or nests without end stops with an error, or is simply short."""
    try:
        read(text)
    except InputError as problem:
        assert problem.where  # noqa: PT017


def test_any_bytes() -> None:
    """Nothing but InputError comes out, whatever the text."""
    chooser = random.Random(5)
    pieces = [
        "$",
        "{",
        "}",
        "(",
        ")",
        '"',
        "'",
        "`",
        "\\",
        "\n",
        " ",
        "A",
        "=",
        "+",
        "[",
        "]",
        "[[",
        "]]",
        "#",
        ";",
        "&&",
    ]
    pieces += [
        "if",
        "then",
        "fi",
        "else",
        "for",
        "do",
        "done",
        "case",
        "esac",
        "<<",
        ">",
        "|",
        "$((",
        "1",
        "@",
        "python x.py",
    ]
    for _ in range(3000):
        text = "".join(chooser.choice(pieces) + chooser.choice(["", " "]) for _ in range(chooser.randint(1, 40)))
        try:
            launches(read(text))
        except InputError:
            continue
