//! A copy of this program in memory, sealed against every change, for a helper that does not run as root.
//!
//! A process in the container may reach the file that its helper executes, as `/proc/PID/exe`. Its user is then the
//! runner's own user. If that user may write the installed program, the process could replace the program
//! (CVE-2019-5736).

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;

/// Returns this process's copy of a program; the first call makes the copy. Blocks the thread.
///
/// # Errors
/// Returns an error if the program cannot be read, or there is no memory for its copy.
pub(super) fn sealed_copy(program: &Path) -> io::Result<Arc<File>> {
    let mut copies = SEALED_COPIES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, copy)) = copies.iter().find(|(copied, _)| copied == program) {
        return Ok(Arc::clone(copy));
    }
    let copy = Arc::new(create_sealed_copy(program)?);
    copies.push((program.to_owned(), Arc::clone(&copy)));
    Ok(copy)
}

fn create_sealed_copy(program: &Path) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = match memfd_create(MEMFD_NAME, flags | MemfdFlags::EXEC) {
        // Before Linux 6.3 every such file is executable, and the kernel does not know the flag.
        Err(Errno::INVAL) => memfd_create(MEMFD_NAME, flags)?,
        made => made?,
    };
    let mut memory = File::from(memory);
    io::copy(&mut File::open(program)?, &mut memory)?;
    // Seals come last: they also forbid this process to write. `SEAL` itself forbids to add or remove seals later.
    let all = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    fcntl_add_seals(&memory, all)?;
    Ok(memory)
}

/// The copies that this process has made: a single one outside of tests.
static SEALED_COPIES: Mutex<Vec<(PathBuf, Arc<File>)>> = Mutex::new(vec![]);

/// The name of the copy in `/proc`, for the operator.
const MEMFD_NAME: &str = "cogni-sandbox";

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{Read, Seek, Write};

    use super::*;

    /// R3: a container cannot change the file that its helper executes, and that file is not the installed program.
    #[test]
    fn a_copy_is_the_same_and_stays_so() {
        let temp_dir = tempfile::tempdir().expect("there is a place for it");
        let program = temp_dir.path().join("program");
        fs::write(&program, "the program").expect("written");
        let copied = sealed_copy(&program).expect("there is memory");
        assert!(Arc::ptr_eq(&copied, &sealed_copy(&program).expect("it is there")));
        let (mut file, mut text) = (&*copied, String::new());
        file.rewind().and_then(|()| file.read_to_string(&mut text)).expect("it can be read");
        assert_eq!(text, "the program");
        file.rewind().expect("it has a place");
        file.write_all(b"another").expect_err("it is sealed");
        file.set_len(0).expect_err("it is sealed");
    }
}
