//! The one tool: a program of the sandbox, with its arguments, its input, and the beginning and end of its output.
//!
//! No shell stands between: a model that wants one calls `["sh", "-c", …]`, and only where there is one. The program is
//! in a process group of its own, and is killed with it when its time is over. What it leaves running in the background
//! goes on for as long as the sandbox does.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::time::Timespec;
use serde::Deserialize;
use serde_json::{Value, json};

/// What the model asks for.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExecRequest {
    /// The program, and its arguments as they stand.
    pub argv: Vec<String>,
    #[serde(default)]
    pub stdin: String,
    /// Seconds.
    #[serde(default = "default_timeout")]
    pub timeout_s: u32,
}

/// What came of it. Prints as the model reads it, in JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecResult {
    /// None of a program that was not started, or was killed.
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub timed_out: bool,
    /// Why it was not started.
    pub error: Option<String>,
    pub stdout: String,
    pub stderr: String,
}

/// The tool in the words of chat completions.
pub fn tool_description() -> Value {
    json!({
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": "Run a program in the workspace, without a shell, and return its exit code and output. \
                            For a shell, run [\"sh\", \"-c\", SCRIPT].",
            "parameters": {
                "type": "object",
                "properties": {
                    "argv": {
                        "type": "array",
                        "items": {"type": "string"},
                        "minItems": 1,
                        "description": "The program and its arguments.",
                    },
                    "stdin": {"type": "string", "description": "What it reads from standard input."},
                    "timeout_s": {
                        "type": "integer",
                        "minimum": 1,
                        "description": "After so many seconds it is killed; 120 if nothing is said.",
                    },
                },
                "required": ["argv"],
                "additionalProperties": false,
            },
        },
    })
}

/// Reads a call.
///
/// # Errors
/// What is wrong with it, in the words of a result.
pub fn parse_call(name: &str, arguments: &str) -> Result<ExecRequest, ExecResult> {
    let wrong = |why: String| ExecResult { error: Some(why), ..ExecResult::default() };
    if name != TOOL_NAME {
        return Err(wrong(format!("there is no tool `{name}`; there is `{TOOL_NAME}`")));
    }
    let asked: ExecRequest = serde_json::from_str(arguments)
        .map_err(|error| wrong(format!("the arguments make no sense: {error}")))?;
    match asked.argv.first() {
        Some(program) if !program.is_empty() => Ok(asked),
        _ => Err(wrong("`argv` names no program".to_owned())),
    }
}

/// Runs the program to its end, or until its time or the agent's is over.
pub fn run_tool(asked: &ExecRequest, deadline: Instant) -> ExecResult {
    let deadline =
        deadline.min(Instant::now() + Duration::from_secs(u64::from(asked.timeout_s.max(1))));
    let child = Command::new(&asked.argv[0])
        .args(&asked.argv[1..])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn();
    let ended = child.and_then(|child| ToolProcessIo::new(child, &asked.stdin)?.run(deadline));
    ended.unwrap_or_else(|error| {
        let error = format!("`{}` cannot be run: {error}", asked.argv[0]);
        ExecResult { error: Some(error), ..ExecResult::default() }
    })
}

impl fmt::Display for ExecResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(error) = &self.error {
            return json!({"error": error}).fmt(f);
        }
        let mut result = json!({
            "exit_code": self.exit_code,
            "stdout": self.stdout,
            "stderr": self.stderr,
        });
        if let Some(signal) = self.signal {
            result["signal"] = json!(signal);
        }
        if self.timed_out {
            result["timed_out"] = json!(true);
        }
        result.fmt(f)
    }
}

/// A program that runs, and what is still to be written to it.
struct ToolProcessIo<'a> {
    child: Child,
    input: Option<ChildStdin>,
    rest: &'a [u8],
    stdout: ToolOutputStream,
    stderr: ToolOutputStream,
}

/// One of its two outputs: `None` at its end.
struct ToolOutputStream {
    source: Option<Box<dyn PollableSource>>,
    capture: ToolOutputBuffer,
}

trait PollableSource: Read + AsFd {}
impl<T: Read + AsFd> PollableSource for T {}

impl<'a> ToolProcessIo<'a> {
    fn new(mut child: Child, input: &'a str) -> io::Result<Self> {
        let stdin = child.stdin.take();
        let stdout = ToolOutputStream::new(child.stdout.take().expect("it is piped"))?;
        let stderr = ToolOutputStream::new(child.stderr.take().expect("it is piped"))?;
        if let Some(stdin) = &stdin {
            fcntl_setfl(stdin, OFlags::NONBLOCK)?;
        }
        Ok(Self { child, input: stdin, rest: input.as_bytes(), stdout, stderr })
    }

    fn run(mut self, deadline: Instant) -> io::Result<ExecResult> {
        let (mut status, mut until) = (None, deadline);
        let mut timed_out = false;
        loop {
            self.move_bytes();
            if status.is_none() {
                status = self.child.try_wait()?;
                if status.is_some() {
                    // Whoever else holds its output has a moment to say the last words, and no more.
                    until = deadline.min(Instant::now() + OUTPUT_DRAIN_TIMEOUT);
                }
            }
            let is_read = self.stdout.source.is_none() && self.stderr.source.is_none();
            match status {
                Some(status) if is_read || Instant::now() >= until => {
                    return Ok(self.into_result(status, timed_out));
                }
                None if Instant::now() >= deadline => {
                    timed_out = true;
                    let group = Pid::from_child(&self.child);
                    let _ = kill_process_group(group, Signal::KILL);
                    status = Some(self.child.wait()?);
                    until = Instant::now() + OUTPUT_DRAIN_TIMEOUT;
                }
                _ => self.wait_for_io(until),
            }
        }
    }

    fn into_result(self, status: ExitStatus, timed_out: bool) -> ExecResult {
        ExecResult {
            exit_code: status.code(),
            signal: status.signal(),
            timed_out,
            error: None,
            stdout: self.stdout.capture.finish(),
            stderr: self.stderr.capture.finish(),
        }
    }

    /// Waits for something to move, for a while: that a program has ended is not to be waited for in this way.
    fn wait_for_io(&self, until: Instant) {
        let sources = [&self.stdout, &self.stderr].into_iter().filter_map(|s| s.source.as_ref());
        let readable =
            sources.map(|source| PollFd::from_borrowed_fd(source.as_fd(), PollFlags::IN));
        let writable = self.input.iter().map(|input| PollFd::new(input, PollFlags::OUT));
        let mut fds: Vec<_> = readable.chain(writable).collect();
        let left = until.saturating_duration_since(Instant::now()).min(POLL_INTERVAL);
        let left = Timespec::try_from(left).expect("a look is some milliseconds");
        // Cut short by a signal it only leads to an earlier look.
        let _ = poll(&mut fds, Some(&left));
    }

    fn move_bytes(&mut self) {
        if let Some(input) = &mut self.input {
            let written = if self.rest.is_empty() { Ok(0) } else { input.write(self.rest) };
            match written {
                Ok(length) => self.rest = &self.rest[length..],
                Err(error) if is_retryable(&error) => {}
                // It does not read; what is left is for nobody.
                Err(_) => self.rest = &[],
            }
            if self.rest.is_empty() {
                self.input = None;
            }
        }
        self.stdout.read_available();
        self.stderr.read_available();
    }
}

impl ToolOutputStream {
    fn new(source: impl PollableSource + 'static) -> io::Result<Self> {
        fcntl_setfl(&source, OFlags::NONBLOCK)?;
        Ok(Self { source: Some(Box::new(source)), capture: ToolOutputBuffer::default() })
    }

    /// Reads what is there, of one that never stops only some.
    fn read_available(&mut self) {
        let mut buffer = [0; READ_BUFFER_BYTES];
        for _ in 0..MAX_READS_PER_TURN {
            let Some(source) = &mut self.source else { return };
            match source.read(&mut buffer) {
                Ok(0) => self.source = None,
                Ok(length) => self.capture.push(&buffer[..length]),
                Err(error) if is_retryable(&error) => return,
                Err(_) => self.source = None,
            }
        }
    }
}

fn is_retryable(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// The beginning and the end of a stream.
#[derive(Clone, Debug, Default)]
pub struct ToolOutputBuffer {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    left_out: u64,
}

impl ToolOutputBuffer {
    pub fn push(&mut self, chunk: &[u8]) {
        let (head, rest) = chunk.split_at(chunk.len().min(KEEP_BYTES - self.head.len()));
        self.head.extend_from_slice(head);
        self.tail.extend(rest);
        let too_many = self.tail.len().saturating_sub(KEEP_BYTES);
        self.tail.drain(..too_many);
        self.left_out += too_many as u64;
    }

    /// Where something is left out, a line says how much. What is not UTF-8 is replaced.
    pub fn finish(self) -> String {
        let Self { head: mut kept, tail, left_out } = self;
        if left_out > 0 {
            kept.extend_from_slice(format!("\n[{left_out} bytes left out]\n").as_bytes());
        }
        kept.extend(tail);
        String::from_utf8_lossy(&kept).into_owned()
    }
}

const TOOL_NAME: &str = "exec";

fn default_timeout() -> u32 {
    120
}

/// Of each stream's beginning, and of its end: some thousand tokens.
pub const KEEP_BYTES: usize = 16 << 10;

const READ_BUFFER_BYTES: usize = 16 << 10;
const MAX_READS_PER_TURN: usize = 16;

/// How often it is looked whether the program has ended, which cannot be waited for together with its output.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// From the end of the program to the end of its output, for processes that still hold it.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_millis(500);
