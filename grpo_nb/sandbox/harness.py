"""Hold the source of bubblewrap's first process, which receives code and calls, and sends values.

The process imports little, because each import delays every program. A program may take it over,
but gains nothing: the process can only send values.
"""

HARNESS = r"""
import marshal, os, resource, sys
from _json import encode_basestring_ascii as quote

with os.fdopen(os.dup(0), "rb") as file:
    token, code, asks, output_bytes, limits = marshal.load(file)
channel = os.fdopen(int(sys.argv[1]), "w", encoding="ascii")

def send(kind, text):
    if len(text) > 6 * output_bytes + 2:
        kind, text = "failed", quote(f"returned more than {output_bytes} bytes")
    channel.write(f'\n{token}["{kind}", {text}]\n')
    channel.flush()

def describe(error):
    if isinstance(error, MemoryError):
        return quote("out of memory")
    try:
        return quote(f"raised {type(error).__name__}: {error}"[:300])
    except BaseException:
        return quote("raised an exception that cannot be shown")

def encode(value):
    kind = type(value)
    if value is None or kind is bool:
        return {None: "null", True: "true", False: "false"}[value]
    if kind is int:
        return str(value)
    if kind is float:
        return repr(value).replace("nan", "NaN").replace("inf", "Infinity")
    if kind is str:
        return quote(value)
    if isinstance(value, dict):
        kind, value = dict, [list(pair) for pair in dict.items(value)]
    if kind not in (dict, list, tuple, set, frozenset):
        return f'{{"other": {quote(kind.__name__)}}}'
    items = "[" + ", ".join(map(encode, value)) + "]"
    return items if kind is list else f'{{"{kind.__name__}": {items}}}'

def load(name):
    for limit, amount in limits.items():
        resource.setrlimit(getattr(resource, limit), (amount, amount))
    module = sys.modules[name] = type(sys)(name)
    module.exit = module.quit = sys.exit
    exec(compile(code, "program.py", "exec"), module.__dict__)
    return module.__dict__

os.dup2(os.memfd_create("stdin"), 0)
send("ready", "null")
problem = None
try:
    space = load("program")
except BaseException as error:
    problem = describe(error)
for expression, arguments in asks:
    try:
        value = None if problem else eval(expression, space)
        text = encode(value if arguments is None or problem else value(*arguments))
    except BaseException as error:
        send("failed", describe(error))
    else:
        send("failed" if problem else "value", problem or text)
os._exit(0)
"""
