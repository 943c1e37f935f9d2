"""The control layer: engines, fleets and routers over HTTP, and requests to them; knows no tensor and no transport.

Here belong addresses, routes, processes of servers, and the order in which an engine pauses, loads, verifies and
resumes. What holds weights belongs to `torchrl_ext.data`, and what does both to `torchrl_ext.sync`.

===============  ======================================================================================
engine client    calls one engine, whatever its make
port             the calls in which makes of engines differ
make             all that is known of one kind of engine: port, description, dialect, command line
fleet            several engines that take a version together; each may fail without the others
pause, resume    stop generating, without losing requests; go on
dialect          how a make wants a request for tokens, and how it answers
router           forwards requests to engines; never an address for control calls
===============  ======================================================================================
"""
