//! The outputs of the commands that one sandbox runs, taken apart and stored as they arrive.
//!
//! **Invariant:** no more bytes of a command are stored than its limit allows, whatever the sandbox prints.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use anyhow::bail;
use tokio::io::AsyncWrite;

use crate::guest::init::command_frames::{CommandEnd, FramePart, FrameReader};
use crate::relay::git::summarize_stderr;
use crate::relay::repo::RepoError;
use crate::relay::repo::artifact::BoundedFile;
use crate::relay::repo::extract_commands::ExtractCommand;

/// The place of a command's standard output.
#[derive(Debug)]
pub(in crate::runner::branch_delivery) enum OutputTarget {
    Memory,
    File(BoundedFile),
}

/// The outputs of the commands, in the order of the commands.
#[derive(Debug)]
pub(super) struct CommandOutputs<const N: usize> {
    reader: FrameReader,
    outputs: [StoredOutput; N],
    /// The index of the command that runs.
    present: usize,
    /// True if the sandbox has printed something else than the frames of `N` commands.
    is_malformed: bool,
}

/// The output of one command.
#[derive(Debug)]
struct StoredOutput {
    target: OutputTarget,
    bytes: Vec<u8>,
    /// The number of bytes that may still come.
    left: u64,
    limit: u64,
    is_over_limit: bool,
    /// The first error of the file.
    failure: Option<RepoError>,
    end: Option<CommandEnd>,
}

impl<const N: usize> CommandOutputs<N> {
    pub(super) fn new(commands: [(OutputTarget, &ExtractCommand); N]) -> Self {
        let outputs = commands.map(|(target, command)| {
            let limit = command.output_bytes;
            let (bytes, is_over_limit) = (vec![], false);
            StoredOutput {
                target,
                bytes,
                left: limit,
                limit,
                is_over_limit,
                failure: None,
                end: None,
            }
        });
        Self { reader: FrameReader::default(), outputs, present: 0, is_malformed: false }
    }

    /// Takes the next piece of the sandbox's standard output. Everything after a malformed piece is ignored.
    fn push(&mut self, piece: &[u8]) {
        if self.is_malformed {
            return;
        }
        let Self { reader, outputs, present, .. } = self;
        let mut has_too_many = false;
        let read = reader.push(piece, |part| match (outputs.get_mut(*present), part) {
            (Some(output), FramePart::Output(piece)) => output.store(piece),
            (Some(output), FramePart::End(end)) => {
                output.end = Some(end);
                *present += 1;
            }
            (None, _) => has_too_many = true,
        });
        self.is_malformed = read.is_err() || has_too_many;
    }

    /// Returns the results of the commands. `why` is the reason why the sandbox ended before a command did.
    pub(super) fn into_results(self, why: &str) -> [anyhow::Result<Vec<u8>>; N] {
        let why = if self.is_malformed { MALFORMED_MESSAGE } else { why };
        self.outputs.map(|output| output.into_result(why))
    }
}

impl StoredOutput {
    fn store(&mut self, piece: &[u8]) {
        // The sandbox ends a command at its limit. If it does not, the rest is not stored.
        let left = self.left.checked_sub(piece.len() as u64);
        self.is_over_limit |= left.is_none();
        let Some(left) = left.filter(|_| !self.is_over_limit && self.failure.is_none()) else {
            return;
        };
        self.left = left;
        match &mut self.target {
            OutputTarget::Memory => self.bytes.extend_from_slice(piece),
            OutputTarget::File(file) => self.failure = file.push(piece).err(),
        }
    }

    /// Returns the result. Of several errors, the cause is returned: a full disk keeps a command from its end, too.
    fn into_result(self, why: &str) -> anyhow::Result<Vec<u8>> {
        let Self { target, bytes, limit, is_over_limit, failure, end, .. } = self;
        if let Some(failure) = failure {
            return Err(failure.into());
        }
        let CommandEnd { status, said: stderr, .. } = match end {
            Some(end) if !is_over_limit && !end.is_over_limit => end,
            None if !is_over_limit => bail!("{why}"),
            _ => bail!("git cannot collect the work: it prints more than {limit} bytes"),
        };
        if status != 0 {
            let stderr = String::from_utf8_lossy(&stderr);
            bail!("git cannot collect the work: {}", summarize_stderr(&stderr));
        }
        if let OutputTarget::File(file) = target {
            file.finish()?;
        }
        Ok(bytes)
    }
}

/// The outputs as the listener of the sandbox's standard output.
impl<const N: usize> AsyncWrite for CommandOutputs<N> {
    /// Stores a piece in place, without a blocking thread: a piece has at most a pipe's size and goes to the page
    /// cache.
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        piece: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().push(piece);
        Poll::Ready(Ok(piece.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

const MALFORMED_MESSAGE: &str =
    "the sandbox that collects the work has printed something else than its commands' output";

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::guest::init::command_frames::{encode_end, encode_output};
    use crate::relay::repo::ArtifactDir;

    /// L3: Each command has a result of its own: its output, or the reason of its failure.
    #[test]
    fn each_command_has_its_own_result() {
        let (temp_dir, mut outputs) = outputs([4, 4]);
        outputs.push(&encode_output(b"aaa"));
        outputs.push(&end(0, false, ""));
        outputs.push(&encode_output(b"bb"));
        let stderr = "hint: Support for grafts\nhint: is deprecated.\nwarning: odd\nfatal: no\n";
        outputs.push(&end(128, false, stderr));
        let [first, second] = outputs.into_results("it is lost");
        assert_eq!(first.expect("it has ended"), b"");
        assert_eq!(fs::read(temp_dir.path().join("first")).expect("it is there"), b"aaa");
        assert_eq!(why(second), "git cannot collect the work: fatal: no\nwarning: odd");
    }

    /// L3: No more than a command's limit is stored, even if the sandbox does not enforce the limit.
    #[test]
    fn no_more_than_a_commands_limit_is_stored() {
        for end_of_first in [end(137, true, ""), end(0, false, "")] {
            let (temp_dir, mut outputs) = outputs([4, 4]);
            outputs.push(&encode_output(b"aaaa"));
            if end_of_first == end(0, false, "") {
                outputs.push(&encode_output(b"aaaa"));
            }
            outputs.push(&end_of_first);
            outputs.push(&encode_output(b"bbbb"));
            outputs.push(&end(0, false, ""));
            let [first, second] = outputs.into_results("it is lost");
            assert_eq!(why(first), "git cannot collect the work: it prints more than 4 bytes");
            assert_eq!(fs::read(temp_dir.path().join("first")).expect("it is there"), b"aaaa");
            assert_eq!(second.expect("it has ended"), b"bbbb");
        }
    }

    /// L3: A command without an end has failed, whatever it printed.
    #[test]
    fn a_command_without_an_end_has_no_result() {
        let (_place, mut outputs) = outputs([4, 4]);
        outputs.push(&encode_output(b"aaaa"));
        outputs.push(&end(0, false, ""));
        outputs.push(&encode_output(b"bbbb"));
        let [first, second] = outputs.into_results("it is lost");
        assert_eq!((first.expect("it has ended"), why(second)), (vec![], "it is lost".to_owned()));
    }

    /// L3: Bytes that are no frame, and frames of a further command, are an error.
    #[test]
    fn malformed_output_is_an_error() {
        let (_place, mut outputs) = outputs([4, 4]);
        outputs.push(&end(0, false, ""));
        outputs.push(b"bbbbbbbb");
        outputs.push(&end(0, false, ""));
        let [first, second] = outputs.into_results("it is lost");
        assert_eq!(
            (first.expect("it has ended"), why(second)),
            (vec![], MALFORMED_MESSAGE.to_owned())
        );
        let (_place, mut outputs) = self::outputs([4, 4]);
        (0..3).for_each(|_| outputs.push(&end(0, false, "")));
        assert!(outputs.is_malformed);
    }

    /// Two commands: the output of the first goes into a file.
    fn outputs(limits: [usize; 2]) -> (tempfile::TempDir, CommandOutputs<2>) {
        let temp_dir = tempfile::tempdir().expect("there is a place for it");
        let artifacts = ArtifactDir::from_path(temp_dir.path());
        let [first, second] = limits.map(|limit| limit as u64);
        let file = artifacts.create_bounded(temp_dir.path().join("first"), first).expect("made");
        let command = |output_bytes| ExtractCommand { argv: vec![], env: vec![], output_bytes };
        let outputs = CommandOutputs::new([
            (OutputTarget::File(file), &command(first)),
            (OutputTarget::Memory, &command(second)),
        ]);
        (temp_dir, outputs)
    }

    fn end(status: u8, is_over_limit: bool, stderr: &str) -> Vec<u8> {
        encode_end(&CommandEnd { status, is_over_limit, said: stderr.as_bytes().to_owned() })
    }

    fn why(result: anyhow::Result<Vec<u8>>) -> String {
        format!("{:#}", result.expect_err("it has failed"))
    }
}
