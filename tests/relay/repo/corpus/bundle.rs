//! Output of a sandbox that lies.

use std::fs;

use super::{AnnouncementClaim, HostileAttack, HostileCase};
use cogni_gateway::relay::repo::ObjectId;
use cogni_gateway::relay::repo::extract_commands::AnnouncedBranch;

pub(super) const ATTACKS: &[HostileAttack] = &[
    ("another count", |case| {
        honest_bundle(case).map(|parsed| {
            parsed.map(|branch| AnnouncedBranch { commits: branch.commits + 1, ..branch })
        })
    }),
    ("another tip", |case| {
        honest_bundle(case)
            .map(|parsed| parsed.map(|branch| AnnouncedBranch { tip: ObjectId::NONE, ..branch }))
    }),
    ("another tree", |case| {
        honest_bundle(case)
            .map(|parsed| parsed.map(|branch| AnnouncedBranch { tree: branch.tip, ..branch }))
    }),
    ("no bundle", |case| change_bundle(case, |_| b"fatal: no".to_vec())),
    ("empty bundle", |case| change_bundle(case, |_| vec![])),
    ("bundle cut in its head", |case| change_bundle(case, |bundle| bundle[..30].to_vec())),
    ("bundle cut in its pack", |case| {
        change_bundle(case, |bundle| bundle[..bundle.len() - 30].to_vec())
    }),
    ("bundle with a flipped bit", |case| {
        change_bundle(case, |mut bundle| {
            let at = bundle.len() - 40;
            bundle[at] ^= 1;
            bundle
        })
    }),
    ("bundle with more behind it", |case| {
        change_bundle(case, |bundle| [bundle, b"more".to_vec()].concat())
    }),
    ("bundle with a long head", |case| {
        change_bundle(case, |bundle| {
            let line = format!("-{} x\n", "1".repeat(40));
            replace_bytes(
                &bundle,
                b"bundle\n",
                format!("bundle\n{}", line.repeat(30_000)).as_bytes(),
            )
        })
    }),
    ("bundle of another branch", |case| {
        change_bundle(case, |bundle| {
            replace_bytes(&bundle, b"refs/heads/sandbox/case", b"refs/heads/main")
        })
    }),
    ("bundle with a tag", |case| make_bundle(case, &["sandbox/case", "v1"], &["--quiet"])),
    ("bundle with two branches", |case| make_bundle(case, &["sandbox/case", "HEAD"], &["--quiet"])),
    ("bundle with a filter", |case| {
        make_bundle(case, &["sandbox/case", "--filter=blob:none"], &["--quiet", "--version=3"])
    }),
    ("bundle of version 3", |case| {
        make_bundle(case, &["sandbox/case"], &["--quiet", "--version=3"])
    }),
    ("bundle with an unknown capability", |case| {
        change_bundle(case, |bundle| {
            replace_bytes(&bundle, b"v2 git bundle\n", b"v3 git bundle\n@uri=http://x/\n")
        })
    }),
    ("bundle without what it needs", |case| {
        change_bundle(case, |bundle| {
            let start = case.run.state.start.to_string();
            replace_bytes(
                &bundle,
                format!("-{start}").as_bytes(),
                format!("-{}", "1".repeat(40)).as_bytes(),
            )
        })
    }),
    ("thin pack without its base", |case| {
        let content = |end: &str| format!("{}{end}\n", "a line that is the same\n".repeat(200));
        case.agent().write("base.txt", content("one"));
        let base = case.agent().commit("Base");
        case.agent().write("base.txt", content("two"));
        case.agent().commit("Tip");
        let announced = case.extract();
        let path = case.run.artifacts.bundle_path();
        let range = ["sandbox/case".to_owned(), format!("^{base}")];
        let words = ["bundle", "create", "--quiet", path.to_str().unwrap()].map(str::to_owned);
        case.agent().git(words.into_iter().chain(range));
        announced
    }),
    ("bundle of everything", |case| make_bundle(case, &["sandbox/case"], &["--quiet", "--"])),
    ("patches of something else", |case| {
        let announced = honest_bundle(case);
        fs::write(case.run.artifacts.patches_path(), "nothing of the kind\n").unwrap();
        announced
    }),
    ("patches with one more", |case| {
        let announced = honest_bundle(case);
        let path = case.run.artifacts.patches_path();
        let patches = fs::read(&path).unwrap();
        let more = "diff --git a/evil b/evil\nnew file mode 100644\n--- /dev/null\n+++ b/evil\n@@ -0,0 +1 @@\n+evil\n";
        fs::write(path, [patches, more.as_bytes().to_vec()].concat()).unwrap();
        announced
    }),
    ("patches that leave the tree", |case| {
        let announced = honest_bundle(case);
        let path = case.run.artifacts.patches_path();
        let text = fs::read_to_string(&path).unwrap();
        fs::write(path, text.replace("honest.txt", "../../outside")).unwrap();
        announced
    }),
    ("no patches", |case| {
        let announced = honest_bundle(case);
        fs::remove_file(case.run.artifacts.patches_path()).unwrap();
        announced
    }),
    ("patches of gigabytes", |case| {
        let announced = honest_bundle(case);
        let file =
            fs::File::options().append(true).open(case.run.artifacts.patches_path()).unwrap();
        file.set_len(3 << 30).unwrap();
        announced
    }),
];

fn honest_bundle(case: &HostileCase) -> AnnouncementClaim {
    case.agent().write("honest.txt", "work\n");
    case.agent().commit("Work");
    case.agent().git(["tag", "v1"]);
    case.extract()
}

/// Changes an honest bundle.
fn change_bundle(case: &HostileCase, change: impl Fn(Vec<u8>) -> Vec<u8>) -> AnnouncementClaim {
    let announced = honest_bundle(case);
    let path = case.run.artifacts.bundle_path();
    let bundle = fs::read(&path).unwrap();
    fs::write(path, change(bundle)).unwrap();
    announced
}

/// Makes a bundle with the agent's own arguments.
fn make_bundle(case: &HostileCase, refs: &[&str], words: &[&str]) -> AnnouncementClaim {
    let announced = honest_bundle(case);
    let path = case.run.artifacts.bundle_path();
    let start = format!("^{}", case.run.state.start);
    let (words, whole) = match words {
        [words @ .., "--"] => (words, true),
        words => (words, false),
    };
    let mut all = vec!["bundle", "create"];
    all.extend(words);
    all.push(path.to_str().unwrap());
    all.extend(refs);
    all.extend((!whole).then_some(start.as_str()));
    case.agent().git(all);
    announced
}

fn replace_bytes(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let at = bytes.windows(from.len()).position(|window| window == from).expect("it is in there");
    [&bytes[..at], to, &bytes[at + from.len()..]].concat()
}
