//! The digest of the program of a tool that is a file, so that an approval is for the program that a person could see.
//!
//! Each argument of the program that is an absolute path stands for a file of this machine: the program itself, or the
//! script that an interpreter reads. The digest has the resolved path, the device, the inode and the content of each
//! such file. A sandbox with an image has no file of this machine; the tool's definition names the image.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

use ring::digest::{Context, SHA256};
use serde::Serialize;
use tokio::task::spawn_blocking;

use super::definition::{ToolDefinition, ToolProgramKind};
use super::job::ToolJob;
use crate::base::canonical;

/// A file of this machine that a program is made of.
#[derive(Serialize)]
struct ProgramFile {
    /// The path without symbolic links.
    path: PathBuf,
    device: u64,
    inode: u64,
    /// The SHA-256 of the content.
    content: String,
}

/// Returns the digest of the files that a tool's program is made of; `None` if no file of this machine is a part of it.
///
/// # Errors
/// Returns an error if a file cannot be read.
pub(super) async fn digest_program(tool: &ToolDefinition) -> io::Result<Option<String>> {
    match &tool.program {
        ToolProgramKind::Job(job) if job.image.is_none() => {
            let job = Arc::clone(job);
            spawn_blocking(move || digest_files(&job)).await.map_err(io::Error::other)?
        }
        ToolProgramKind::Job(_)
        | ToolProgramKind::CurrentTime
        | ToolProgramKind::MetricsQuery
        | ToolProgramKind::Mcp(_) => Ok(None),
    }
}

fn digest_files(job: &ToolJob) -> io::Result<Option<String>> {
    let mut files = vec![];
    for word in job.argv.iter().filter(|word| word.starts_with('/')) {
        match ProgramFile::read_file(word) {
            Ok(file) => files.push((word, file)),
            // A path that exists in the sandbox only, such as a file that the program writes.
            Err(error) if error.kind() == io::ErrorKind::NotFound => files.push((word, None)),
            Err(error) => return Err(error),
        }
    }
    let digest = canonical::digest("tool program 1", &files).map_err(io::Error::other)?;
    Ok((!files.is_empty()).then_some(digest))
}

impl ProgramFile {
    /// Reads a file to its end; `None` for a directory or another object without content.
    fn read_file(path: &str) -> io::Result<Option<Self>> {
        let path = std::fs::canonicalize(path)?;
        // The kind is checked first, because opening a pipe would wait for its writer.
        if !std::fs::metadata(&path)?.is_file() {
            return Ok(None);
        }
        let mut file = File::open(&path)?;
        let facts = file.metadata()?;
        let (mut digest, mut buffer) = (Context::new(&SHA256), vec![0; BUFFER_BYTES]);
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                count => digest.update(&buffer[..count]),
            }
        }
        let content = hex::encode(digest.finish());
        Ok(Some(Self { path, device: facts.dev(), inode: facts.ino(), content }))
    }
}

/// The size of one read, in bytes.
const BUFFER_BYTES: usize = 64 * 1024;
