//! The fake provider over raw TCP: what it puts on the wire, how it fails, what it remembers.

mod command;
mod faults;
mod playback;
mod protocol;
mod raw_client;
mod request_log;
mod script;
