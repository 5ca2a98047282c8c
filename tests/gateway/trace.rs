//! G4, G12: Tests of traces: the client cannot choose the trace of a call, and the collector receives the right spans.

mod context;
mod spans;
