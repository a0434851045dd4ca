"""Ids, and every struct that crosses a process.

All are frozen and tagged; `pack` puts the wire version in front and `unpack` compares it before it
decodes anything else, so that two releases in one cluster refuse each other with a clear error
instead of misreading each other.

Life of a request: a `GenerateRequest` (tokens in) is prefilled, which gives a `Handover` (where its
KV is), and decoded, which gives a stream of `Delta`s (tokens and text out). A request that belongs
to a round carries its `Membership`; the coordinator gathers those of one round into a `RoundPlan`.
"""

from __future__ import annotations

import enum
from typing import Any, NewType, TypeVar

import msgspec

from td_serve.errors import TdServeError

TenantId = NewType("TenantId", str)
"""Whose a request is: the name that the cluster file gives."""
OPEN = TenantId("")
"""Everybody, where the cluster file names no tenants."""
SessionId = NewType("SessionId", str)
"""A simulation of one tenant: agents that play rounds together (`tenants.session`)."""
AgentId = NewType("AgentId", str)
RequestId = NewType("RequestId", str)
ReplicaId = NewType("ReplicaId", str)
"""An engine's name, new with every start: `prefill-…-<random>`."""
Epoch = NewType("Epoch", int)
"""The birth number of a process whose memory others refer to."""
ConversationKey = NewType("ConversationKey", str)
"""A conversation of one tenant: nobody can name another tenant's (`conversations.key`)."""
LeaseId = NewType("LeaseId", str)
"""A decode engine's promise to keep a turn's blocks. New with every turn; never used again."""
ReaderId = NewType("ReaderId", str)
"""One attempt to read a lease's blocks."""
SegmentKey = NewType("SegmentKey", str)
"""Position-independent identity of a run of tokens: 128 bits, hexadecimal."""

WIRE_VERSION = 6


class WireVersionError(TdServeError):
    """Two processes of one cluster speak different wire versions."""


class _Wire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the wire structs: frozen, and strict about what they are decoded from."""


# ------------------------------------------------------------------------------------ requests


class Membership(_Wire, tag="membership", frozen=True, kw_only=True):
    """A request's place in a round, as its client states it (`td_round`); `sim` says whose it is.

    `round` and `n_agents` are None on the zero-change path, where the client cannot state them: the
    coordinator then counts rounds itself and closes one when every agent it knows has joined.
    `deadline_ms` counts from the first member's arrival; None means the deployment's default.
    `position` is the agent's place in the round's one order, where somebody gave it one. An `exact`
    member is prefilled as it is, whatever the others share; of one that is not `kept` no KV is
    left for others.
    """

    sim: SessionId
    agent: AgentId
    round: int | None = None
    n_agents: int | None = None
    deadline_ms: int | None = None
    position: int | None = None
    exact: bool = False
    kept: bool = True


class Origin(_Wire, frozen=True, kw_only=True):
    """Whose a request is, and what it belongs to: a round, a conversation, both or neither.

    `texts` are those of a member's messages that were sent in segments, as these.
    """

    tenant: TenantId = OPEN
    membership: Membership | None = None
    conversation: ConversationKey | None = None
    texts: list[list[str]] = []


class GenerateRequest(_Wire, tag="generate", frozen=True, kw_only=True):
    """One prompt to continue: tokens in.

    `sampling` is the engine's own encoding of its sampling parameters; nobody but an engine opens
    it. `hand_over` is False where the decode engine must see the whole prompt itself (prompt
    log-probabilities), so that prefill on another engine would be wasted. `n` repeats what
    `sampling` says of the number of continuations. A turn of a `conversation` leaves its KV under a
    lease for the next one. The prompt's segments begin at token 0 and at each of `cuts`; where it
    has any, or belongs to a round, `head` is what prompts of this model begin with, its system text
    a neutral one. `age_s` is for how long it had been under way when this was sent. A turn that is
    not kept for its conversation is kept under `writes` where it has that, for those who read what
    it puts out.
    """

    request_id: RequestId
    prompt_token_ids: list[int]
    sampling: bytes
    n: int = 1
    hand_over: bool = True
    cache_salt: str | None = None
    priority: int = 0
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    membership: Membership | None = None
    conversation: ConversationKey | None = None
    cuts: list[int] = []
    head: list[int] = []
    age_s: float = 0.0
    writes: ConversationKey | None = None


class Handle(_Wire, tag="handle", frozen=True, kw_only=True):
    """What lets a prefill engine read a finished turn's KV from the decode engine that keeps it.

    `replica` is the engine, in its life number `epoch`, with its side channel at `host`:`port`.
    `block_ids` has one list for each KV group, of blocks of `block_size` tokens; the blocks hold
    the KV of `tokens` tokens, namely those of `digests` and `tail` (see `handles`). Where only what
    the turn has put out is kept, the first `skipped` blocks and all digests are missing, so that it
    is no prompt's beginning. `remaining_s`
    is how long the lease lasted when this was sent: a duration, no time of any clock. `number`
    counts the leases that the engine had granted before: of two turns the later has the higher.
    `prefilled_by` had the turn's prompt last, and may have it still.
    """

    lease: LeaseId
    conversation: ConversationKey
    replica: ReplicaId
    epoch: Epoch
    host: str
    port: int
    tp_size: int
    block_size: int
    block_ids: list[list[int]]
    tokens: int
    digests: bytes
    tail: list[int]
    remaining_s: float
    number: int = 0
    prefilled_by: ReplicaId | None = None
    skipped: int = 0


class Handover(_Wire, tag="handover", frozen=True, kw_only=True):
    """Where a finished prefill's KV is.

    Whoever holds it owns the prefill engine's pin on those blocks, and must see them read
    (`decode`) or given up (`release`). The pin lasts `lease_s` seconds from the end of the prefill
    on, longer only while a decode engine that has the request renews it; what is read after that is
    somebody else's. `kv` is the connector's own description and is opaque here. Of the
    `prompt_tokens`, `cached_tokens` were not computed: found in the prefill engine's prefix cache,
    or, `read` says how many, read from the decode engine that kept them, `kept_by`. Where the KV is
    not what the prompt alone would give, `cache_salt` keeps it apart: the decode engine must use it
    in place of the request's own. `blended` then says where it came from.
    """

    request_id: RequestId
    replica: ReplicaId
    kv: dict[str, Any]
    lease_s: float
    prompt_tokens: int
    cached_tokens: int
    read: Read | None = None
    kept_by: ReplicaId | None = None
    cache_salt: str | None = None
    blended: PassTokens | None = None


class Read(_Wire, frozen=True, kw_only=True):
    """A read of a handle's blocks: the tokens and bytes that came, and how long that took.

    It has `failed` where the lease ended or the decode engine died under way: nothing of it was
    used then.
    """

    tokens: int
    bytes: int
    seconds: float
    failed: bool = False


class TokenLogprob(_Wire, frozen=True, kw_only=True):
    """One candidate token at one position: natural log-probability, rank from 1 on."""

    token_id: int
    logprob: float
    rank: int | None = None
    text: str | None = None


class ChoiceDelta(_Wire, frozen=True, kw_only=True):
    """What one continuation gained since the last delta: tokens, their text, log-probabilities."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[list[TokenLogprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Delta(_Wire, tag="delta", frozen=True, kw_only=True):
    """A step of a decode: what each of its continuations gained.

    `prompt_logprobs` comes with the first delta, where it was asked for; its first entry is None
    (nothing precedes the first token). `cached_tokens` counts the prompt tokens that
    no engine computed. `handle` comes with the last one, where the turn's KV is kept.
    """

    choices: list[ChoiceDelta]
    finished: bool
    cached_tokens: int = 0
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    handle: Handle | None = None


ADMITTED = Delta(choices=[], finished=False)
"""The first delta of every decode: the decode engine has the request, and owns its handover."""


# ------------------------------------------------------------------------------------ rounds


class Mode(enum.Enum):
    """How a member's prompt is prefilled."""

    EXACT = "exact"
    """An ordinary prefill of the prompt as sent. Always available."""
    BLEND = "blend"
    """One collective pass for the group: reused segments, selected tokens recomputed."""
    SHARE = "share"
    """Running requests reference the shared pages in the engine's own pool."""


class Source(enum.Enum):
    """Where the KV of a placed segment comes from."""

    COMPUTE = "compute"
    REUSE = "reuse"
    READ = "read"


class Placement(_Wire, frozen=True, kw_only=True):
    """A run of a member's prompt, tokens [start, start + tokens), and where its KV comes from.

    `segment` is None for tokens that are nobody else's and have no identity of their own.
    """

    segment: SegmentKey | None
    start: int
    tokens: int
    source: Source = Source.COMPUTE


class MemberPlan(_Wire, frozen=True, kw_only=True):
    """One member of a planned round. `layout` covers its prompt without gap or overlap.

    `reason` says why the member is served in this mode when another was asked for or expected.
    """

    agent: AgentId
    request_id: RequestId
    mode: Mode
    prompt_tokens: int
    layout: list[Placement]
    reason: Alone | None = None


class RoundPlan(_Wire, tag="round-plan", frozen=True, kw_only=True):
    """A round as one unit of work: who takes part, and how each prompt is prefilled.

    Carries ids only. `canonical` is the one order of the shared segments for all members.
    `absent` are agents that were expected and had not joined at the deadline (a count: their names
    are not known).
    """

    sim: SessionId
    round: int
    members: list[MemberPlan]
    canonical: list[SegmentKey] = []
    absent: int = 0


class RoundPrefill(_Wire, tag="round-prefill", frozen=True, kw_only=True):
    """What a prefill replica gets: the plan, and the members' requests in the plan's order.

    `handles`, by request id, are of members whose conversations are kept somewhere. Members that
    are in one of the `passes` are prefilled by it, the others each by themselves; of those that
    have a name in `histories` the KV is kept under it, for passes to come. `turns`, by lease, are
    of turns in which was written what the members share.
    """

    plan: RoundPlan
    requests: list[GenerateRequest]
    handles: dict[str, Handle] = {}
    passes: list[PassSpec] = []
    histories: dict[str, str] = {}
    turns: dict[str, Handle] = {}


class MemberHandover(_Wire, tag="member-handover", frozen=True, kw_only=True):
    """One member's prefill is done (`handover`), or failed (`error`)."""

    request_id: RequestId
    handover: Handover | None = None
    error: str | None = None


class AgentOutput(_Wire, frozen=True, kw_only=True):
    """What an agent put out in a round: text as the model wrote it, and its tokens."""

    agent: AgentId
    text: str
    token_ids: list[int] = []


class RoundRecord(_Wire, tag="round-record", frozen=True, kw_only=True):
    """The outputs of a round, in the one order in which they are handed on.

    `complete` is False while members are still being waited for or served.
    """

    sim: SessionId
    round: int
    outputs: list[AgentOutput]
    complete: bool = True


# ------------------------------------------------------------------------------------ passes


class RuleName(enum.Enum):
    """Which of the shared tokens are computed anew (`pic`)."""

    FULL = "full"
    NONE = "none"
    FIRST_K = "first_k"
    """The first `k` tokens of every segment."""
    FIRST_PAGES = "first_pages"
    """The first `k` pages of the shared part."""
    HKVD = "hkvd"
    """Those whose KV deviates most."""
    FIRST_K_HKVD = "first_k+hkvd"
    FIRST_PAGES_HKVD = "first_pages+hkvd"


class Rule(_Wire, frozen=True, kw_only=True):
    """A recovery rule and its measure.

    `k` is for the rules of beginnings. Those of deviation choose, by what is seen after a share
    `depth` of the layers, in runs of `run` tokens, until what is not chosen deviates by `left` or
    less on average; where that takes more than a share `ratio` of the shared tokens, members are
    prefilled alone. With `left` 0 that share is chosen. They choose for the whole group at once,
    or for each member by its `own`. `weighed`, a token's deviation counts by how much what is asked
    attends to it.
    """

    name: RuleName
    k: int = 0
    ratio: float = 0.0
    left: float = 0.0
    depth: float = 0.0
    run: int = 1
    own: bool = False
    weighed: bool = False


class Alone(enum.Enum):
    """Why a member of a round is prefilled as it is, though others are prefilled together."""

    ASKED_FOR = "it is asked for"
    ONE_SEGMENT = "its prompt is one segment"
    COMPUTED_WHERE_DECODED = "its prompt is computed where it is decoded"
    NOTHING_SHARED = "it shares no segment with others"
    OTHER_ORDER = "most of its segments stand in another order than the others'"
    NOBODY_ELSE = "nobody else fits"


class Span(_Wire, frozen=True, kw_only=True):
    """`tokens` tokens from `start` on."""

    start: int
    tokens: int


class Piece(_Wire, frozen=True, kw_only=True):
    """`tokens` tokens from `start` on in a prompt, the canonical sequence's from `source` on."""

    start: int
    tokens: int
    source: int


class Canonical(_Wire, frozen=True, kw_only=True):
    """A round's shared segments in the one order, after a header of the engine's own.

    `segments` are spans of `token_ids`; the header is what stands before the first.
    """

    key: SegmentKey
    token_ids: list[int]
    segments: list[Span]


class MemberPass(_Wire, frozen=True, kw_only=True):
    """A member's part in a pass: its prompt up to the end of the shared part.

    Its result is found under `request_id`, once; `history` names the KV that is kept from round to
    round of how its prompt begins (none is, where it is empty). `asked` is the rest of its prompt,
    for rules that go by it.
    """

    request_id: RequestId
    history: str
    token_ids: list[int]
    pieces: list[Piece]
    asked: list[int] = []


class Written(_Wire, frozen=True, kw_only=True):
    """What a turn has put out of the canonical sequence: `piece` stands so in the turn's tokens.

    `name` is the lease's that keeps their KV; once they have been read into an engine, what they
    are called there.
    """

    name: str
    piece: Piece


class PassSpec(_Wire, tag="pass", frozen=True, kw_only=True):
    """A collective pass: the members of one round, prefilled as one.

    What is `written` is taken as it was decoded, the rest of the canonical sequence computed around
    it. Without members the pass leaves the canonical sequence's KV, for one that is to come.
    """

    canonical: Canonical
    rule: Rule
    members: list[MemberPass]
    written: list[Written] = []


class Said(_Wire, frozen=True, kw_only=True):
    """What an agent put out `before`, and what `now`: None while it is not known."""

    before: str
    now: str | None


class Forecast(_Wire, tag="forecast", frozen=True, kw_only=True):
    """What tells of a session's next round, before it comes (`foresight`).

    `last` is the canonical sequence of the round under way, which shares what was said `before` in
    one order; with `grows` it had the one before it within it.
    """

    sim: SessionId
    last: Canonical
    grows: bool
    said: list[Said]


class PassTokens(_Wire, frozen=True, kw_only=True):
    """Where a member's `prompt` tokens came from: prompt = local + reused + selected + new.

    `local` was kept from earlier rounds, `reused` taken from the canonical sequence, `selected`
    shared and computed anew all the same, `new` its own. `left` is how far what was reused deviates
    from what it would be in the context of those members that the rule has looked at, averaged over
    all shared tokens that were not all members' already; None where it has not looked.
    """

    prompt: int
    local: int
    reused: int
    selected: int
    new: int
    left: float | None = None


class PassResult(_Wire, tag="pass-result", frozen=True, kw_only=True):
    """By request id: what a pass has made ready to be loaded; and how many tokens of the canonical
    sequence had to be computed for it.

    Members for whom the rule would compute too much are not among them.
    """

    members: dict[str, PassTokens]
    canonical: int = 0


# ------------------------------------------------------------------------------------ replicas


class ReplicaState(_Wire, tag="replica-state", frozen=True, kw_only=True):
    """What a replica tells the directory: who it is, its birth, what its engine holds right now.

    `kv_usage` is the used share of the engine's KV pool, 0 to 1, blocks pinned for others and kept
    for next turns included; `leases` are the turns kept. `why_no_passes` says why a prefill engine
    cannot prefill members of a round together, if it cannot.
    """

    replica: ReplicaId
    role: str
    epoch: Epoch
    host: str
    nixl_port: int
    transports: list[str]
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    leases: int = 0
    why_no_passes: str | None = None


class Registered(_Wire, tag="registered", frozen=True, kw_only=True):
    """What the directory answers to a replica: its own birth, and which of the replica's leases
    are of turns after which another replica keeps a newer one."""

    epoch: Epoch
    superseded: list[LeaseId] = []


Message = (
    Membership
    | GenerateRequest
    | Handle
    | Handover
    | Delta
    | RoundPlan
    | RoundPrefill
    | MemberHandover
    | RoundRecord
    | ReplicaState
    | Registered
    | PassSpec
    | PassResult
    | Forecast
)
M = TypeVar("M", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """Encode `message` for another process: two bytes of wire version, then MessagePack."""
    return WIRE_VERSION.to_bytes(2, "big") + _encoder.encode(message)


def unpack(data: bytes, kind: type[M]) -> M:
    """Decode a `kind` packed by another process.

    Raises WireVersionError when the other process speaks another version or sent something else.
    """
    version = int.from_bytes(data[:2], "big")
    if version != WIRE_VERSION:
        raise WireVersionError(
            f"wire version {version} from another process, expected {WIRE_VERSION}: "
            "all replicas of a deployment must run the same td_serve"
        )
    try:
        message = _decoder.decode(data[2:])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireVersionError(f"got no {kind.__name__} that can be decoded: {error}") from None
    if not isinstance(message, kind):
        raise WireVersionError(f"got a {type(message).__name__}, expected a {kind.__name__}")
    return message
