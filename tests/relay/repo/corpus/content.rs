//! Files whose content some program interprets.

use std::os::unix::fs::{PermissionsExt, symlink};

use super::{AnnouncementClaim, HostileAttack, HostileCase};

pub(super) const ATTACKS: &[HostileAttack] = &[
    ("CRLF", |case| commit_file(case, "dos.txt", b"one\r\ntwo\r\n")),
    ("no end of line", |case| commit_file(case, "README.md", b"# A project, changed")),
    ("binary", |case| {
        commit_file(case, "image.bin", &[0, 159, 146, 150, 0, 255, 10, 13, 10].repeat(300))
    }),
    ("9 MiB of zeros", |case| commit_file(case, "zeros", &vec![0; 9 << 20])),
    ("2 MiB of text", |case| commit_file(case, "long.txt", &b"a line of it\n".repeat(160 << 10))),
    ("1,001 files", |case| {
        let blob = case.agent().object("blob", "x");
        let mut stream =
            "commit refs/heads/sandbox/case\ncommitter A <a@example.com> 1767323045 +0000\n\
            data 4\nMany\nfrom refs/heads/sandbox/case^0\n"
                .to_owned();
        stream.extend((0..1001).map(|at| format!("M 100644 {blob} many/{at}\n")));
        case.agent().git_with(["fast-import", "--quiet"], stream.as_bytes());
        case.extract()
    }),
    ("link out", |case| commit_link(case, "way", "../../../../etc/passwd")),
    ("link to the root", |case| commit_link(case, "docs/way", "/")),
    ("link into .git", |case| commit_link(case, "docs/way", "../.GIT/hooks")),
    ("link inside", |case| commit_link(case, "docs/way", "../README.md")),
    ("link by way of a link", |case| {
        symlink(".", case.agent().path.join("r")).unwrap();
        commit_link(case, "out", "r/r/r/../../../etc/passwd")
    }),
    ("link up after a name", |case| commit_link(case, "docs/way", "deep/../../README.md")),
    ("link up and down again", |case| commit_link(case, "docs/way", "../src/main.c")),
    ("link with other separators", |case| commit_link(case, "way", "..\\..\\etc\\passwd")),
    ("link to a drive", |case| {
        commit_link(case, "one", "C:/Windows/x")?;
        commit_link(case, "two", "d:x")
    }),
    ("link into .git, by ignored ends", |case| {
        commit_link(case, "one", ".git./hooks")?;
        commit_link(case, "two", ".git::$INDEX_ALLOCATION/hooks")?;
        commit_link(case, "three", "docs/... /x")
    }),
    ("link into .git, by a hidden letter", |case| {
        commit_link(case, "docs/way", "../.g\u{200c}it/hooks")
    }),
    ("file through a link", |case| {
        let outside = case.place.path("");
        symlink(outside, case.agent().path.join("way")).unwrap();
        case.agent().commit("A link");
        case.agent().git(["rm", "-q", "--cached", "way"]);
        std::fs::remove_file(case.agent().path.join("way")).unwrap();
        commit_file(case, "way/outside", b"touched")
    }),
    ("workflow", |case| commit_file(case, ".github/workflows/ci.yml", b"on: push\n")),
    ("workflow, in other letters", |case| {
        commit_file(case, ".GitHub/Workflows/ci.yml", b"on: push\n")
    }),
    ("workflow, and away again", |case| {
        commit_file(case, ".github/workflows/ci.yml", b"on: push\n")?;
        std::fs::remove_dir_all(case.agent().path.join(".github")).unwrap();
        commit_file(case, "honest.txt", b"work\n")
    }),
    ("pipelines of other forges", |case| {
        for path in
            ["Jenkinsfile", "azure-pipelines.yml", "tools/act/action.yml", ".buildkite/p.yml"]
        {
            case.agent().write(path, "steps: []\n");
        }
        commit_file(case, "bitbucket-pipelines.yml", b"pipelines: {}\n")
    }),
    ("settings of services that deploy", |case| {
        for path in
            ["zuul.d/jobs.yaml", "render.yaml", "heroku.yml", "amplify.yml", "buildkite.json"]
        {
            case.agent().write(path, "steps: []\n");
        }
        commit_file(case, ".zuul.yaml", b"- job: {}\n")
    }),
    ("files that a developer's command executes", |case| {
        for path in ["Vagrantfile", "flake.nix", "compose.yaml", "deploy/app.json"] {
            case.agent().write(path, "services: {}\n");
        }
        commit_file(case, "tests/conftest.py", b"import os\n")
    }),
    ("tool's settings further down", |case| {
        commit_file(case, "sub/.claude/settings.json", b"{}\n")
    }),
    ("names in letters of other scripts", |case| {
        case.agent().write("pac\u{212a}age.json", "{}\n");
        commit_file(case, "AGENT\u{17f}.md", b"Do as I say.\n")
    }),
    ("CODEOWNERS", |case| commit_file(case, "docs/CODEOWNERS", b"* @me\n")),
    (".gitattributes", |case| commit_file(case, "src/.gitattributes", b"* filter=evil\n")),
    (".gitmodules", |case| {
        commit_file(
            case,
            ".gitmodules",
            b"[submodule \"a\"]\n\tpath = a\\r\n\turl = https://example.com/a\n",
        )
    }),
    (".gitmodules with an option", |case| {
        commit_file(case, ".gitmodules", b"[submodule \"a\"]\n\tpath = a\n\turl = -u./evil\n")
    }),
    (".gitmodules about a full disk", |case| {
        let said =
            b"[submodule \"a\"]\n\tpath = a\n\turl = \"-u\\nfatal: No space left on device\"\n";
        commit_file(case, ".gitmodules", said)
    }),
    ("top-level dot directory", |case| commit_file(case, ".vscode/tasks.json", b"{}\n")),
    ("agent instructions", |case| commit_file(case, "src/AGENTS.md", b"Do as I say.\n")),
    ("agent instructions under other names", |case| {
        for path in ["AGENTS.override.md", "CLAUDE.local.md", "opencode.json"] {
            case.agent().write(path, "Do as I say.\n");
        }
        commit_file(case, "CONVENTIONS.md", b"Do as I say.\n")
    }),
    ("lock file", |case| commit_file(case, "web/package-lock.json", b"{}\n")),
    ("LFS pointer", |case| {
        commit_file(
            case,
            "big.bin",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        )
    }),
    ("LFS pointers of other spellings", |case| {
        let oid = format!("oid sha256:{}\nsize 1\n", "4d7a2146".repeat(8));
        let latest = "version https://git-lfs.github.com/spec/v1";
        for (path, text) in [
            ("a.bin", format!("version http://git-media.io/v/2\n{oid}")),
            ("b.bin", format!("version https://hawser.github.com/spec/v1\n{oid}")),
            ("c.bin", format!("\n \n{latest}\n{oid}")),
        ] {
            case.agent().write(path, &text);
        }
        commit_file(case, "d.bin", format!("ext-0-x sha256:0\n{latest}\n{oid}").as_bytes())
    }),
    ("program", |case| {
        let path = case.agent().path.join("src/main.c");
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
        case.agent().commit("Run it");
        case.extract()
    }),
    ("private key", |case| {
        commit_file(case, "key.pem", b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n")
    }),
    ("token, and away again", |case| {
        let token = format!("token = \"ghp_{}\"\n", "a1B2c3D4e5F6".repeat(3));
        commit_file(case, "conf.toml", token.as_bytes())?;
        commit_file(case, "conf.toml", b"token = \"\"\n")
    }),
    ("token of the documentation", |case| commit_file(case, "doc.md", b"AKIAIOSFODNN7EXAMPLE\n")),
    ("token that calls itself an example", |case| {
        commit_file(case, "doc.md", format!("ghp_{}EXAMPLE\n", "a1B2c3D4e5F6".repeat(3)).as_bytes())
    }),
    ("token with a dull end", |case| {
        let token = format!("ghp_{}{}\n", "a1B2c3D4e5F6".repeat(3), "x".repeat(40));
        commit_file(case, "doc.md", token.as_bytes())
    }),
    ("token after letters, and before", |case| {
        commit_file(case, "doc.md", format!("xghp_{}_x\n", "a1B2c3D4e5F6".repeat(3)).as_bytes())
    }),
    ("token in UTF-16", |case| {
        let token = format!("token = ghp_{}\n", "a1B2c3D4e5F6".repeat(3));
        let wide: Vec<_> = token.encode_utf16().flat_map(u16::to_le_bytes).collect();
        commit_file(case, "wide.txt", &wide)
    }),
    ("token of x", |case| {
        commit_file(case, "doc.md", format!("ghp_{}\n", "x".repeat(36)).as_bytes())
    }),
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
        commit_file(case, "README.md/inner", b"deeper\n")
    }),
    ("directory turned into a link", |case| {
        std::fs::remove_dir_all(case.agent().path.join("docs")).unwrap();
        commit_link(case, "docs", "src")
    }),
];

fn commit_file(case: &HostileCase, path: &str, content: &[u8]) -> AnnouncementClaim {
    case.agent().write(path, content);
    case.agent().git(["add", "-A", "-f"]);
    case.agent().commit("A file");
    case.extract()
}

fn commit_link(case: &HostileCase, path: &str, target: &str) -> AnnouncementClaim {
    symlink(target, case.agent().path.join(path)).unwrap();
    case.agent().commit("A link");
    case.extract()
}
