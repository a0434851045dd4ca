"""The client side: recorded rounds of many agents, played through a running endpoint.

Read in this order: `trace` (what was recorded), `workload` (what each agent has to read in a
round), `layouts` (where it stands in the prompt), `window` (what is left out when it is too long),
`member` (one request), `replay` (all rounds), `report` (what was measured). All but `member` and
`replay` are free of input and output, apart from reading the trace and the tokenizer's files.
"""
