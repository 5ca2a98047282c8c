//! Masks paths of this machine in texts that other people will read.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use memchr::memmem;

/// The paths to mask. All paths below them are masked, too.
#[derive(Clone, Debug, Default)]
pub struct PathMask {
    /// The longest path comes first, so that it is masked as a whole.
    paths: Vec<String>,
}

impl PathMask {
    /// Creates a mask for these paths and, if they are symbolic links, for their targets. The root of the file system
    /// is never masked.
    pub fn new<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Self {
        let mut all: Vec<_> =
            paths.into_iter().flat_map(|path| path_spellings(path.as_ref())).collect();
        all.sort_unstable_by(|one, other| other.len().cmp(&one.len()).then(one.cmp(other)));
        all.dedup();
        Self { paths: all }
    }

    /// Returns the text with [`PATH_PLACEHOLDER`] in place of each path and of the rest of the path behind it.
    pub fn mask_paths<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let mut masked = Cow::Borrowed(text);
        for path in &self.paths {
            if let Some(without) = mask_path(path, &masked) {
                masked = Cow::Owned(without);
            }
        }
        masked
    }
}

/// Returns the text with the path masked; `None` if the text does not contain the path.
fn mask_path(path: &str, text: &str) -> Option<String> {
    let (mut masked, mut from) = (String::new(), 0);
    for at in memmem::find_iter(text.as_bytes(), path) {
        let (before, rest) = (&text[..at], &text[at + path.len()..]);
        // The match must not be a part of a longer name: `/srv/data` is not masked in `/srv/database`.
        let begins = !before.ends_with(|c| is_path_character(c) && c != '/');
        let ends = !rest.starts_with(|c| is_path_character(c) && c != '/');
        if at < from || !begins || !ends {
            continue;
        }
        masked.push_str(&text[from..at]);
        masked.push_str(PATH_PLACEHOLDER);
        let length = rest.find(|c| !is_path_character(c)).unwrap_or(rest.len());
        from = at + path.len() + length;
    }
    (from > 0).then(|| masked + &text[from..])
}

/// Returns true if a character can be part of a path. A name with another character is masked up to that character.
fn is_path_character(c: char) -> bool {
    c.is_alphanumeric() || "/._-+@%=~".contains(c)
}

/// Returns the spellings of a path: as it is given, made absolute, and with its links resolved.
fn path_spellings(path: &Path) -> Vec<String> {
    let real = path.canonicalize().ok();
    let absolute = std::path::absolute(path).ok();
    let all: [Option<PathBuf>; 3] = [Some(path.to_owned()), absolute, real];
    let texts =
        all.into_iter().flatten().filter_map(|path| path.into_os_string().into_string().ok());
    let texts = texts.map(|text| text.trim_end_matches('/').to_owned());
    texts.filter(|text| text.starts_with('/')).collect()
}

/// The text that replaces a path.
pub const PATH_PLACEHOLDER: &str = "[host path]";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_path_is_masked_with_all_that_is_below_it() {
        let mask = PathMask::new(["/srv/state/", "/srv", "/", "/run/cogni"]);
        for (text, masked) in [
            ("cannot use `/srv/state/work/1/bundle`: full", "cannot use `[host path]`: full"),
            ("/srv/state", "[host path]"),
            ("'/srv/state/a b'", "'[host path] b'"),
            ("fatal: /run/cogni/x.lock: /run/cogni: no", "fatal: [host path]: [host path]: no"),
            // Other paths that only begin or end like the masked paths.
            (
                "/srvs/state and /run/cogni-2 and /a/run/cogni",
                "/srvs/state and /run/cogni-2 and /a/run/cogni",
            ),
            (
                "/workspace/src and / and file:///srv/git",
                "/workspace/src and / and file://[host path]",
            ),
        ] {
            assert_eq!(mask.mask_paths(text), masked);
        }
        assert!(matches!(mask.mask_paths("nothing of it"), Cow::Borrowed(_)));
    }

    #[test]
    fn a_link_is_masked_by_both_of_its_names() {
        let place = tempfile::tempdir().expect("there is a place for it");
        let (real, link) = (place.path().join("real"), place.path().join("link"));
        std::fs::create_dir(&real).expect("made");
        std::os::unix::fs::symlink(&real, &link).expect("made");
        let mask = PathMask::new([&link]);
        let text = format!("{} is {}", link.display(), real.display());
        assert_eq!(mask.mask_paths(&text), "[host path] is [host path]");
    }

    proptest! {
        /// A path that stands by itself is masked, and masking a text again changes nothing.
        #[test]
        fn no_path_is_left(before in "[ -~äö€\n]{0,40}", after in "[ -~äö€\n]{0,40}") {
            let mask = PathMask::new(["/srv/state", "/srv/state/deep/er"]);
            let text = format!("{before} `/srv/state/deep/er` and `/srv/state`: {after}");
            let masked = mask.mask_paths(&text).into_owned();
            prop_assert!(!masked.contains(" `/srv/state"));
            prop_assert_eq!(mask.mask_paths(&masked), masked.as_str());
        }
    }
}
