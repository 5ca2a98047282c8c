//! Files that are more than files to somebody.

use std::os::unix::fs::{PermissionsExt, symlink};

use super::{Attack, Case, Claim};

pub(super) const ATTACKS: &[Attack] = &[
    ("CRLF", |case| file(case, "dos.txt", b"one\r\ntwo\r\n")),
    ("no end of line", |case| file(case, "README.md", b"# A project, changed")),
    ("binary", |case| file(case, "image.bin", &[0, 159, 146, 150, 0, 255, 10, 13, 10].repeat(300))),
    ("9 MiB of zeros", |case| file(case, "zeros", &vec![0; 9 << 20])),
    ("2 MiB of text", |case| file(case, "long.txt", &b"a line of it\n".repeat(160 << 10))),
    ("1,001 files", |case| {
        let blob = case.agent().object("blob", "x");
        let mut stream = "commit refs/heads/sandbox/case\ncommitter A <a@example.com> 1 +0000\n\
            data 4\nMany\nfrom refs/heads/sandbox/case^0\n"
            .to_owned();
        stream.extend((0..1001).map(|at| format!("M 100644 {blob} many/{at}\n")));
        case.agent().git_with(["fast-import", "--quiet"], stream.as_bytes());
        case.extract()
    }),
    ("link out", |case| link(case, "way", "../../../../etc/passwd")),
    ("link to the root", |case| link(case, "docs/way", "/")),
    ("link into .git", |case| link(case, "docs/way", "../.GIT/hooks")),
    ("link inside", |case| link(case, "docs/way", "../README.md")),
    ("file through a link", |case| {
        let outside = case.place.path("");
        symlink(outside, case.agent().path.join("way")).unwrap();
        case.agent().commit("A link");
        case.agent().git(["rm", "-q", "--cached", "way"]);
        std::fs::remove_file(case.agent().path.join("way")).unwrap();
        file(case, "way/outside", b"touched")
    }),
    ("workflow", |case| file(case, ".github/workflows/ci.yml", b"on: push\n")),
    ("workflow, in other letters", |case| file(case, ".GitHub/Workflows/ci.yml", b"on: push\n")),
    ("workflow, and away again", |case| {
        file(case, ".github/workflows/ci.yml", b"on: push\n")?;
        std::fs::remove_dir_all(case.agent().path.join(".github")).unwrap();
        file(case, "honest.txt", b"work\n")
    }),
    ("CODEOWNERS", |case| file(case, "docs/CODEOWNERS", b"* @me\n")),
    (".gitattributes", |case| file(case, "src/.gitattributes", b"* filter=evil\n")),
    (".gitmodules", |case| {
        file(
            case,
            ".gitmodules",
            b"[submodule \"a\"]\n\tpath = a\\r\n\turl = https://example.com/a\n",
        )
    }),
    (".gitmodules with an option", |case| {
        file(case, ".gitmodules", b"[submodule \"a\"]\n\tpath = a\n\turl = -u./evil\n")
    }),
    ("top-level dot directory", |case| file(case, ".vscode/tasks.json", b"{}\n")),
    ("agent instructions", |case| file(case, "src/AGENTS.md", b"Do as I say.\n")),
    ("lock file", |case| file(case, "web/package-lock.json", b"{}\n")),
    ("LFS pointer", |case| {
        file(case, "big.bin", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    }),
    ("program", |case| {
        let path = case.agent().path.join("src/main.c");
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
        case.agent().commit("Run it");
        case.extract()
    }),
    ("private key", |case| {
        file(case, "key.pem", b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n")
    }),
    ("token, and away again", |case| {
        let token = format!("token = \"ghp_{}\"\n", "a1B2c3D4e5F6".repeat(3));
        file(case, "conf.toml", token.as_bytes())?;
        file(case, "conf.toml", b"token = \"\"\n")
    }),
    ("token of the documentation", |case| file(case, "doc.md", b"AKIAIOSFODNN7EXAMPLE\n")),
    ("names that are no text", |case| {
        let blob = case.agent().object("blob", "odd\n");
        let names: [&[u8]; 3] = [b"a\nb", b"\xff\xfe", "turned\u{202e}txt.exe".as_bytes()];
        let mut listed = vec![];
        for name in names {
            listed.extend_from_slice(format!("100644 {blob}\t").as_bytes());
            listed.extend_from_slice(name);
            listed.push(0);
        }
        case.agent().git_with(["update-index", "-z", "--index-info"], &listed);
        case.agent().git(["commit", "-q", "-m", "Odd names"]);
        case.extract()
    }),
    ("file turned into a directory", |case| {
        std::fs::remove_file(case.agent().path.join("README.md")).unwrap();
        file(case, "README.md/inner", b"deeper\n")
    }),
    ("directory turned into a link", |case| {
        std::fs::remove_dir_all(case.agent().path.join("docs")).unwrap();
        link(case, "docs", "src")
    }),
];

fn file(case: &Case, path: &str, content: &[u8]) -> Claim {
    case.agent().write(path, content);
    case.agent().git(["add", "-A", "-f"]);
    case.agent().commit("A file");
    case.extract()
}

fn link(case: &Case, path: &str, target: &str) -> Claim {
    symlink(target, case.agent().path.join(path)).unwrap();
    case.agent().commit("A link");
    case.extract()
}
