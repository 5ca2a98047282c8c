//! Which file is the first process of a sandbox: `cogni-init`, wherever that is, or this program in its place.

use std::env;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::spec::Root;

/// What may stand there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum First {
    /// Nothing of ours: the root brings a bridge of its own.
    #[default]
    None,
    /// What somebody has named, in every root.
    Given(PathBuf),
    /// What was installed with this program.
    Ours {
        /// Where this machine's programs run.
        here: PathBuf,
        /// In every root, as it needs no library; there need not be one.
        anywhere: Option<PathBuf>,
    },
}

/// There is none for such a root.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{}` needs libraries of this machine, which another root may not have; make a static cogni-init with `docker/init`, and say with `--init` where it is, or `--init none` for a root with a bridge of its own",
    .0.display()
)]
pub struct NotStatic(pub PathBuf);

impl First {
    /// `cogni-init` beside this program, or this program, which is the same by that name.
    ///
    /// # Errors
    /// This program has no path.
    pub fn ours() -> io::Result<Self> {
        let this = env::current_exe()?;
        let beside = this.with_file_name("cogni-init");
        let both = [&beside, &this].into_iter().filter(|path| path.is_file());
        let here = both.clone().next().unwrap_or(&this).clone();
        let anywhere = { both }.find(|path| is_static(path).unwrap_or(false)).cloned();
        Ok(Self::Ours { here, anywhere })
    }

    /// The file, for a sandbox with this root.
    ///
    /// # Errors
    /// There is none that would run there.
    pub fn file(&self, root: &Root) -> Result<Option<&Path>, NotStatic> {
        match (self, root) {
            (Self::None, _) => Ok(None),
            (Self::Given(path), _) | (Self::Ours { here: path, .. }, Root::Host) => Ok(Some(path)),
            (Self::Ours { here, anywhere }, _) => match anywhere {
                Some(path) => Ok(Some(path)),
                None => Err(NotStatic(here.clone())),
            },
        }
    }
}

/// Whether a program of this machine's kind names no loader (ELF-64, little-endian).
fn is_static(path: &Path) -> io::Result<bool> {
    let file = File::open(path)?;
    let mut head = [0; 64];
    file.read_exact_at(&mut head, 0)?;
    if !head.starts_with(b"\x7fELF") {
        return Ok(false);
    }
    let table = u64::from_le_bytes(head[0x20..0x28].try_into().expect("eight bytes"));
    let [size, count] = [0x36, 0x38].map(|at| u16::from_le_bytes([head[at], head[at + 1]]));
    for index in 0..count {
        let mut kind = [0; 4];
        file.read_exact_at(&mut kind, table + u64::from(index) * u64::from(size))?;
        if u32::from_le_bytes(kind) == INTERPRETER {
            return Ok(false);
        }
    }
    Ok(true)
}

/// `PT_INTERP` (elf(5)).
const INTERPRETER: u32 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_with_a_loader_is_not_static() {
        assert!(!is_static(&env::current_exe().expect("a path")).expect("it can be read"));
        assert!(!is_static(Path::new(file!())).unwrap_or(false));
    }

    #[test]
    fn another_root_has_what_runs_anywhere() {
        let (here, anywhere) = (PathBuf::from("/here"), PathBuf::from("/anywhere"));
        let image = Root::Image("sha256:0".to_owned());
        let ours = First::Ours { here: here.clone(), anywhere: Some(anywhere.clone()) };
        assert_eq!(ours.file(&Root::Host), Ok(Some(&*here)));
        assert_eq!(ours.file(&image), Ok(Some(&*anywhere)));
        let ours = First::Ours { here: here.clone(), anywhere: None };
        assert_eq!(ours.file(&image), Err(NotStatic(here)));
        assert_eq!(First::Given(anywhere.clone()).file(&image), Ok(Some(&*anywhere)));
        assert_eq!(First::None.file(&image), Ok(None));
    }
}
