//! The root of a sandbox: this machine's programs or an unpacked root, mounted into an empty directory of the run.
//! Nothing is ever written to the sources.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::sandbox::SandboxError;
use crate::sandbox::spec::{BindMount, MountAccess, RootSource, oci};

/// Makes the empty root directory, and returns the mounts to show in the directory.
///
/// # Errors
/// Returns an error if the directory cannot be made, or the root cannot be read.
pub(super) fn prepare_rootfs(
    root: &RootSource,
    directory: &Path,
    uid: u32,
) -> Result<Vec<BindMount>, SandboxError> {
    let cannot = |error: io::Error| {
        SandboxError::EmbeddedFailed(format!("the root cannot be prepared: {error}"))
    };
    let mut root_dir = RootfsBuilder { path: directory.to_owned(), mounts: vec![] };
    root_dir
        .create_root_dir()
        .and_then(|()| match root {
            RootSource::Host => root_dir.bind_host_programs(uid),
            RootSource::Directory(path) => root_dir.bind_root_entries(path),
            RootSource::Image(_) => Err(io::ErrorKind::Unsupported.into()),
        })
        .map_err(cannot)?;
    Ok(root_dir.mounts)
}

struct RootfsBuilder {
    path: PathBuf,
    mounts: Vec<BindMount>,
}

impl RootfsBuilder {
    /// Creates the root directory, which the sandbox's user can search.
    fn create_root_dir(&self) -> io::Result<()> {
        fs::create_dir(&self.path)?;
        // A second call, because the umask limits the mode of `create_dir`.
        fs::set_permissions(&self.path, Permissions::from_mode(0o755))
    }

    fn bind_host_programs(&mut self, uid: u32) -> io::Result<()> {
        // Programs and their libraries are mounted: they are large, and the sandbox must not be able to change them.
        for path in HOST_PROGRAMS.iter().chain(HOST_DIRECTORIES).map(Path::new) {
            self.bind_path(path, path)?;
        }
        for path in HOST_FILES.iter().map(Path::new) {
            // Not every machine has each file, and a copy costs less than a mount.
            if let Ok(text) = fs::read(path) {
                self.write_file(path, &text)?;
            }
        }
        for (path, text) in GENERATED_FILES {
            let text = text.replace(UID_PLACEHOLDER, &uid.to_string());
            self.write_file(Path::new(path), text.as_bytes())?;
        }
        Ok(())
    }

    fn bind_root_entries(&mut self, root: &Path) -> io::Result<()> {
        for entry in fs::read_dir(root)? {
            let entry = entry?;
            let target = Path::new("/").join(entry.file_name());
            // The sandbox mounts its own directories at these paths.
            // An entry of the same name in the unpacked root would be covered, or would cover them.
            if !oci::is_reserved_target(&target) {
                self.bind_path(&entry.path(), &target)?;
            }
        }
        Ok(())
    }

    /// Shows one path of this machine. A symlink is re-created, so that it resolves inside the root; a missing path is
    /// left out.
    fn bind_path(&mut self, source: &Path, target: &Path) -> io::Result<()> {
        let Ok(found) = fs::symlink_metadata(source) else { return Ok(()) };
        // The link itself is copied and not followed here: on this machine it could lead out of the root.
        if found.is_symlink() {
            let link = self.mount_point_for(target)?;
            symlink(fs::read_link(source)?, link)
        } else {
            let (source, target) = (source.to_owned(), target.to_owned());
            self.mounts.push(BindMount { source, target, access: MountAccess::ReadOnly });
            Ok(())
        }
    }

    fn write_file(&self, path: &Path, text: &[u8]) -> io::Result<()> {
        let path = self.mount_point_for(path)?;
        fs::write(&path, text)?;
        fs::set_permissions(&path, Permissions::from_mode(0o644))
    }

    fn mount_point_for(&self, target: &Path) -> io::Result<PathBuf> {
        let mount_point = self.path.join(target.strip_prefix("/").unwrap_or(target));
        let parent = mount_point.parent().unwrap_or(&self.path);
        fs::create_dir_all(parent)?;
        // The umask must not shut the sandbox's user out.
        if parent != self.path {
            fs::set_permissions(parent, Permissions::from_mode(0o755))?;
        }
        Ok(mount_point)
    }
}

/// Returns true if a sandbox with this machine's programs shows a path of this machine.
pub fn shows_host_path(path: &Path) -> bool {
    HOST_PROGRAMS
        .iter()
        .chain(HOST_DIRECTORIES)
        .chain(HOST_FILES)
        .any(|shown| path.starts_with(shown))
}

/// The directories of this machine's programs and their libraries.
const HOST_PROGRAMS: &[&str] = &["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"];

/// The directories of configuration that programs read and that hold no secrets.
const HOST_DIRECTORIES: &[&str] = &[
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/crypto-policies",
    "/etc/pki/ca-trust",
    "/etc/pki/tls/certs",
    "/etc/ssl/certs",
];
/// The files of configuration that programs read and that hold no secrets.
const HOST_FILES: &[&str] = &[
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/os-release",
    "/etc/protocols",
    "/etc/services",
    "/etc/ssl/openssl.cnf",
];

/// The placeholder for the sandbox's user in [`GENERATED_FILES`].
const UID_PLACEHOLDER: &str = "UID";

/// The files that replace this machine's own, which would show more than a sandbox has to know.
const GENERATED_FILES: &[(&str, &str)] = &[
    ("/etc/passwd", include_str!("passwd")),
    ("/etc/group", "root:x:0:\nagent:x:UID:\nnogroup:x:65534:\n"),
    ("/etc/hosts", "127.0.0.1 localhost\n"),
    ("/etc/hostname", "sandbox\n"),
    ("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"),
    ("/etc/resolv.conf", ""),
];
