//! Tests of the fake provider over raw TCP: its bytes on the wire, its faults, and its request log.

mod command;
mod faults;
mod playback;
mod protocol;
mod raw_client;
mod request_log;
mod script;
mod strict;
