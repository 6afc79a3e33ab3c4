"""How bytes and tensors reach one another; knows nothing of policies, actors or clusters.

A tour, bottom up:

- `clock`: time as a value, so that deadlines are tested without waiting.
- `errors`: what can go wrong on the wire; facts are attributes.
- `address`: one type for `ipc://`, `tcp://` and `loop://`, IPv6 and the AF_UNIX length limit included.
- `codec`: typed records and plain values to MessagePack and back; arrays ride beside it, uncopied.
- `control`: what every network of control messages promises: bounded, ordered, at most once.
- `zmq_control`: that promise kept by ZeroMQ, on the loop that runs; `zmq_pump` drains its sockets.
- `security`: the keys of a run. Who does not have them is never heard over TCP.
- `mappings`: segments that are read again and again, leased without being mapped anew.
- `stream`: what is too large for messages, from host to host, received in place.
- `loopback`: the same promise kept inside one process, with a manual clock, cut cables and lost messages.
- `shm`: arrays written once into shared memory and read in place.

Messages are small and go through `control`; arrays are large and go through `shm`, between hosts through
`stream`. Nothing is imported
here, so that `import transport` stays light.
"""
